# SPDX-License-Identifier: Apache-2.0
"""How ranks that have rows of their own exchange them within a layer: of split layers, or keys and values.

"peer" reads the other GPUs' memory; "nccl" and "gloo" are collectives (comm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lorakernels.device import capability_of, multiprocessors_of
from lorakernels.kernels.triton.sum_rows import MOST_PARTS, sum_rows
from lorakernels.ops.hardware import why_not_wgmma
from lorakernels.parallel.ranks import comm
from lorakernels.parallel.ranks.rows import Beside, Branch, RowExchange

_ALIGNED = 256  # bytes, of a tensor in the ranks' memory
LEAST = 1 << 20  # bytes of that memory
# kinds of exchanges whose tensors in that memory are kept: inputs may have any length
MOST_VIEWS = 256
# What an exchange beside a product gains between H100s, as bytes that a rank sends per second: their way over NVLink,
# and copies on the GPU that a gather saves. What it costs in seconds: more launches, starts of the product's pipeline.
GATHERED, SUMMED, START = 2.5e11, 5e11, 2e-5


class CollectiveRows:
    """By collectives of `group`, one after the other."""

    def __init__(self, group: Any, name: str) -> None:
        self.group, self.name = group, name

    def gather(self, *parts: Tensor, totals: Sequence[Tensor] = ()) -> list[Tensor]:
        return [*(comm.gather_rows(self.group, part) for part in parts), *self.total(*totals)]

    def sum(
        self, whole: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        found = comm.sum_rows(self.group, whole)
        if added is not None:
            found.add_(added)
        if factor is None:
            return found, None
        return found, comm.sum_rows(self.group, factor.float()).to(factor.dtype)

    def total(self, *parts: Tensor) -> list[Tensor]:
        if not parts:
            return []
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        comm.all_reduce(self.group, flat)
        sums = flat.split([part.numel() for part in parts])
        return [f.view(part.shape).to(part.dtype) for f, part in zip(sums, parts, strict=True)]

    def lay_down(
        self, shape: torch.Size, dtype: torch.dtype, write: Callable[[Tensor], None]
    ) -> None:
        return None

    def beside(self, gain: float, slower: Callable[[int], float]) -> None:
        return None


class PeerRows:
    """Out of the other ranks' memory. A rank lays down what is for others, all wait for each other, and each reads.

    The waits are torch's barriers between GPUs: nothing waits on the host, so that graphs can hold an exchange. All
    exchanges of a group use one memory, and have to be on one stream.

    Where a rank raises in the middle of an exchange beside a product, or while it lays something down, its next one
    would be another than the others'. It raises a RuntimeError from then on. They wait until that process ends, or for
    the timeout of their group.
    """

    name = "peer"
    _broken = ""  # what was raised in the middle of an exchange

    def __init__(self, group: Any, device: torch.device, multiprocessors: int = 0) -> None:
        """`multiprocessors`: the least of a rank, where rows may travel beside products; 0 where they do not."""
        self._group, self._device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._others = [(self._rank + turn) % self._size for turn in range(1, self._size)]
        self._milliseconds = int(comm.timeout_of(group, device).total_seconds() * 1000)
        self._capacity, self._held = 0, list[Tensor]()
        self._handle: Any = None
        self._views: dict[Any, list[list[Tensor]]] = {}
        self._side: Any = None  # the stream of what goes beside products
        self._multiprocessors = multiprocessors

    def gather(self, *parts: Tensor, totals: Sequence[Tensor] = ()) -> list[Tensor]:
        parts = tuple(part.contiguous() for part in parts)
        forms = [(part.shape, part.dtype) for part in parts]
        there = self._memory(forms + _flat(totals))
        self._wait()  # until the others have read what was there
        for place, part in zip(there[self._rank], parts, strict=False):
            place.copy_(part)
        _lay_down(there[self._rank], totals)
        self._wait()  # until they have written
        found = []
        for index, part in enumerate(parts):
            whole = part.new_empty((self._size * part.shape[0], *part.shape[1:]))
            rows = whole.chunk(self._size) if part.numel() else [whole] * self._size
            for rank in self._others:
                rows[rank].copy_(there[rank][index])
            rows[self._rank].copy_(part)
            found.append(whole)
        return found + _totals(there, totals)

    def sum(
        self, whole: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._refuse_if_broken()
        if whole.dtype == torch.float64:  # the kernel adds in fp32
            return CollectiveRows(self._group, "nccl").sum(whole, factor, added)
        whole = whole.contiguous()
        forms = [(whole.shape, whole.dtype)]
        if factor is not None:
            forms.append((factor.shape, factor.dtype))
        whole_there = self._memory(forms)
        there = [[t.chunk(self._size) for t in each] for each in whole_there]
        mine, own = there[self._rank], self._rank
        self._wait()
        rows = whole.chunk(self._size)
        for rank in self._others:
            mine[0][rank].copy_(rows[rank])
        if factor is not None:
            whole_there[own][1].copy_(factor)
        self._wait()
        parts = [rows[own] if r == own else there[r][0][own] for r in range(self._size)]
        found = sum_rows(parts, None if added is None else added.contiguous(), whole.dtype)
        if factor is None:
            return found, None
        return found, sum_rows([each[1][own] for each in there], None, factor.dtype)

    def total(self, *parts: Tensor) -> list[Tensor]:
        return self.gather(totals=parts) if parts else []

    def lay_down(
        self, shape: torch.Size, dtype: torch.dtype, write: Callable[[Tensor], None]
    ) -> list[Tensor]:
        there = [place for (place,) in self._memory([(shape, dtype)])]
        self._wait()  # until the others have read what was there
        with self._breaking_off():
            write(there[self._rank])
        self._wait()  # until they have written
        return there

    def beside(self, gain: float, slower: Callable[[int], float]) -> Beside | None:
        if self._multiprocessors == 0 or gain <= START:
            return None
        if gain <= START + slower(self._multiprocessors):
            return None
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        return _PeersBeside(self)

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """The middle of an exchange: what is raised there ends all later exchanges.

        A capture ends, too, but nothing has run in it, so that later exchanges are as before.
        """
        before = self._broken
        try:
            yield
        except BaseException as error:
            self._broken = before or str(error) or type(error).__name__
            with suppress(RuntimeError):  # of a capture or a device that failed: `error` says why
                if torch.cuda.is_current_stream_capturing():
                    self._broken = before
            raise

    def _memory(self, forms: list[tuple[torch.Size, torch.dtype]]) -> list[list[Tensor]]:
        """For each rank its memory for tensors of these shapes and dtypes. It grows where it is too small."""
        self._refuse_if_broken()
        key = tuple(forms)
        found = self._views.pop(key, None) or self._lay_out(forms)
        self._views[key] = found  # behind all others, so that the first was not used for longest
        if len(self._views) > MOST_VIEWS:
            del self._views[next(iter(self._views))]
        return found

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RuntimeError(
                f"an exchange of rows broke off on this rank ({self._broken}), and the others are still in it: end the "
                "process on all ranks"
            )

    def _lay_out(self, forms: list[tuple[torch.Size, torch.dtype]]) -> list[list[Tensor]]:
        starts, end = [], 0
        for shape, dtype in forms:
            starts.append(end // dtype.itemsize)
            end += aligned(shape.numel() * dtype.itemsize)
        # Ranks wait for each other by the handle, also where there is nothing to exchange.
        if self._handle is None or end > self._capacity:
            self._grow(end)
        return [
            [
                self._handle.get_buffer(rank, *form, start)
                for form, start in zip(forms, starts, strict=True)
            ]
            for rank in range(self._size)
        ]

    def _grow(self, wanted: int) -> None:
        """Older memory stays: graphs may use it."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"ranks exchange {wanted} bytes at once, of which {self._capacity} are there: run the step eagerly "
                "once before it is captured"
            )
        import torch.distributed._symmetric_memory as symmetric

        self._views.clear()
        self._capacity = max(LEAST, 1 << max(wanted - 1, 0).bit_length())
        memory = comm.peer_memory(self._capacity, self._device)
        self._handle = symmetric.rendezvous(memory, self._group.group_name)
        self._held.append(memory)

    def _wait(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=self._milliseconds)


class _PeersBeside:
    """PeerRows' exchanges beside products. A rank writes what is for another into that one's memory.

    Copy engines send the rows, on a stream of its own, which leaves the multiprocessors to the product. R-wide factors
    are sent before it: a kernel beside it would wait for it. A stream that is captured joins again, too.

    Ranks cannot wait for each other in a circle. Only barriers depend on another rank. They are on the products' stream
    alone, equally many on all ranks, and never beside a product, whose blocks may hold all multiprocessors. Copies
    depend on their own rank's streams.
    """

    def __init__(self, peers: PeerRows) -> None:
        self._peers = peers

    def gather(
        self,
        product: Callable[[slice, list[Tensor]], None],
        parts: Sequence[Tensor],
        totals: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        peers = self._peers
        parts = [part.contiguous() for part in parts]
        rows, own, size = parts[0].shape[0], peers._rank, peers._size
        forms = [(torch.Size([size * rows, *part.shape[1:]]), part.dtype) for part in parts]
        there = peers._memory(forms + _flat(totals))
        mine, here = there[own], slice(own * rows, (own + 1) * rows)
        peers._wait()  # until the others have multiplied what was there
        small = [(there[r][i][here], p) for i, p in enumerate(parts) if i for r in range(size)]
        if small:
            torch._foreach_copy_([place for place, _ in small], [part for _, part in small])
        _lay_down(mine, totals)
        with self._at_once():
            self._send([(there[rank][0][here], parts[0]) for rank in peers._others])
            product(here, parts)
            self._join()
        peers._wait()  # until they have written
        factors = [whole.clone() for whole in mine[1 : len(parts)]]
        for piece in (slice(0, here.start), slice(here.stop, size * rows)):
            if piece.start < piece.stop:
                product(piece, [mine[0][piece], *(factor[piece] for factor in factors)])
        return factors + _totals(there, totals)

    def sum(
        self,
        product: Callable[[slice], Tensor],
        rows: int,
        factor: Tensor | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._peers._refuse_if_broken()
        forms = [] if factor is None else [self._of_a_rank(factor)]
        with self._at_once():
            there, sent = self._others_rows(product, rows, factor, forms)
            mine = product(self._rows(rows)).contiguous()
            self._join()
        found = self._added_up(mine, there, added)
        del sent
        if factor is None:
            return found, None
        return found, sum_rows([*there[self._peers._rank][1]], None, factor.dtype)

    def sum_with(
        self, product: Callable[[slice, Tensor | None], Tensor], rows: int, branch: Branch
    ) -> tuple[Tensor, list[Tensor]]:
        self._peers._refuse_if_broken()
        given, partials, form = branch
        forms = [self._of_a_rank(given), *([] if form is None else [form])]
        with self._at_once():
            there, sent = self._others_rows(lambda at: product(at, None), rows, given, forms)
            here = there[self._peers._rank]
            self._peers._wait()  # until the others' factors are here, which went ahead of their rows
            factor = sum_rows([*here[1]], None, given.dtype)
            totals = partials(factor)
            _lay_down(here, totals)
            mine = product(self._rows(rows), factor).contiguous()
            self._join()
        found = self._added_up(mine, there, None)
        del sent
        return found, _totals(there, totals)

    def _rows(self, rows: int, turn: int = 0) -> slice:
        """Of all `rows` those of the rank that is so many behind this one."""
        peers, each = self._peers, rows // self._peers._size
        rank = (peers._rank + turn) % peers._size
        return slice(rank * each, (rank + 1) * each)

    def _of_a_rank(self, factor: Tensor) -> tuple[torch.Size, torch.dtype]:
        """The form of what all ranks write for one of them."""
        size, (rows, *others) = self._peers._size, factor.shape
        return torch.Size([size, rows // size, *others]), factor.dtype

    def _others_rows(
        self,
        product: Callable[[slice], Tensor],
        rows: int,
        factor: Tensor | None,
        forms: list[tuple[torch.Size, torch.dtype]],
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Multiply the other ranks' rows and begin to send them, `factor` first.

        Returns each rank's memory, for rows [ranks, M, N] and what has the `forms`, and what copy engines still read.
        """
        peers, there, sent = self._peers, list[list[Tensor]](), list[Tensor]()
        for turn, rank in enumerate(peers._others, 1):
            part = product(self._rows(rows, turn)).contiguous()
            if not there:
                every = (torch.Size([peers._size, *part.shape]), part.dtype)
                there = peers._memory([every, *forms])
                peers._wait()  # until the others have added what was there
                self._spread(there, factor)
            self._send([(there[rank][0][peers._rank], part)])
            sent.append(part)
        return there, sent

    def _added_up(self, mine: Tensor, there: list[list[Tensor]], added: Tensor | None) -> Tensor:
        """The sum of the own rows, of which this rank has its product, when all ranks have sent theirs."""
        self._peers._wait()  # until they have written
        own = self._peers._rank
        parts = [mine if r == own else there[own][0][r] for r in range(self._peers._size)]
        return sum_rows(parts, None if added is None else added.contiguous(), mine.dtype)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """The products and copies of an exchange. What is raised there ends the copies, and all later exchanges."""
        with self._peers._breaking_off():
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # as in `_breaking_off`
                    self._join()  # before memory that they read serves others
                raise

    def _spread(self, there: list[list[Tensor]], factor: Tensor | None) -> None:
        """Write each rank's rows of `factor` into its memory."""
        if factor is not None:
            places = [each[1][self._peers._rank] for each in there]
            torch._foreach_copy_(places, [*factor.chunk(self._peers._size)])

    def _send(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        side = self._peers._side
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            for place, part in copies:
                place.copy_(part, non_blocking=True)

    def _join(self) -> None:
        side = self._peers._side
        torch.cuda.current_stream(side.device).wait_stream(side)


def aligned(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes of the ranks' memory."""
    return -(-size // _ALIGNED) * _ALIGNED


def _flat(totals: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """The form in which `totals` lie one after the other: of their dtype, or of fp32 if they have several."""
    if not totals:
        return []
    dtypes = {part.dtype for part in totals}
    size = sum(part.numel() for part in totals)
    return [(torch.Size([size]), dtypes.pop() if len(dtypes) == 1 else torch.float32)]


def _lay_down(places: list[Tensor], totals: Sequence[Tensor]) -> None:
    """Copy `totals` to the last of a rank's `places`, in one launch."""
    if totals:
        flat = places[-1].split([part.numel() for part in totals])
        torch._foreach_copy_(
            [f.view(part.shape) for f, part in zip(flat, totals, strict=True)], [*totals]
        )


def _totals(there: list[list[Tensor]], totals: Sequence[Tensor]) -> list[Tensor]:
    """The sums of what all ranks have laid down, added in one order on all."""
    if not totals:
        return []
    flat = [places[-1] for places in there]
    sums = sum_rows(flat, None, flat[0].dtype).split([part.numel() for part in totals])
    return [f.view(part.shape).to(part.dtype) for f, part in zip(sums, totals, strict=True)]


def row_exchange(
    transport: str,
    group: Any,
    device: torch.device,
    overlap: bool | None = False,
) -> tuple[RowExchange, str]:
    """Collective: (how ranks exchange rows, why in words).

    With `overlap` None, rows travel beside products where all ranks can do so and it gains time. True refuses where not
    all can.

    Raises:
        ValueError: `overlap` is True, and not all ranks can read the others' memory, or have Hopper's kernels; or as
            `comm.choose`.
        RuntimeError: as `comm.choose`.
    """
    name, why = comm.choose(transport, group, device)
    if name == "peer" and dist.get_world_size(group) > MOST_PARTS:
        name, why = "nccl", f"more than {MOST_PARTS} ranks"
    if name != "peer":
        if overlap:
            raise ValueError(
                f"overlap=True needs ranks that read each other's memory, found transport {name!r}: {why}"
            )
        return CollectiveRows(group, name), why
    if overlap is False:
        return PeerRows(group, device), why
    multiprocessors, why_not = _of_all(group, device)
    if why_not and overlap:
        raise ValueError(f"overlap=True needs Hopper's kernels on all ranks: {why_not}")
    how = f"not beside products: {why_not}" if why_not else "beside products of fused FP8 layers"
    return PeerRows(group, device, multiprocessors), f"{why}; {how}"


def _of_all(group: Any, device: torch.device) -> tuple[int, str]:
    """Collective: (the least multiprocessors of a rank, ""), or (0, why a rank cannot multiply rows in pieces).

    Beside products rows lie elsewhere in the ranks' memory. So all ranks exchange them there, or none.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    mine = multiprocessors_of(index), why_not_wgmma(capability_of(device)) or ""
    found = comm.agree(group, mine)
    for rank, (_, why_not) in enumerate(found):
        if why_not:
            return 0, f"rank {rank}: {why_not}"
    return min(count for count, _ in found), ""
