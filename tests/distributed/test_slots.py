# SPDX-License-Identifier: Apache-2.0
"""The order of gathers and layers on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from lorakernels.parallel.base.slots import StreamLane


def test_gathers_are_ordered_with_the_layers_on_another_gpu_than_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it, a gather would overwrite what a layer reads, and the layer would not wait for its weights."""
    gpu, current = torch.device("cuda", 1), torch.device("cuda", 0)
    streams = {device: MagicMock(name=str(device)) for device in (gpu, current)}

    def stream_of(device: Any = None) -> Any:
        return streams[current if device is None else device]

    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    lane = StreamLane(gpu)
    lane.enter()
    pending = lane.run(lambda: None)
    lane.wait(pending)
    lane._stream.wait_stream.assert_called_once_with(streams[gpu])
    streams[gpu].wait_event.assert_called_once_with(pending)
    assert not streams[current].mock_calls
