# SPDX-License-Identifier: Apache-2.0
"""Exchanges of rows within a layer: rows of split layers, or keys and values. Each rank has rows of its own.

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

_ALIGNED = 256  # bytes: alignment of a tensor in the ranks' shared memory
LEAST = 1 << 20  # bytes of that memory
# Views of that memory are cached for so many combinations of shapes; inputs may have any length.
MOST_VIEWS = 256
# Between H100s, overlapping an exchange with a GEMM gains the bytes that a rank sends divided by GATHERED or SUMMED
# bytes/s: the time on NVLink, and for a gather also copies on the GPU. It costs START seconds: more launches, and more
# starts of the GEMM's pipeline.
GATHERED, SUMMED, START = 2.5e11, 5e11, 2e-5


class CollectiveRows:
    """Exchanges by collectives of `group`, one after the other."""

    def __init__(self, group: Any, name: str) -> None:
        self.group, self.name = group, name

    def gather(self, *parts: Tensor, totals: Sequence[Tensor] = ()) -> list[Tensor]:
        return [*(comm.gather_rows(self.group, part) for part in parts), *self.total(*totals)]

    def sum(
        self, whole: Tensor, factor: Tensor | None = None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        rows = comm.sum_rows(self.group, whole)
        if added is not None:
            rows.add_(added)
        if factor is None:
            return rows, None
        return rows, comm.sum_rows(self.group, factor.float()).to(factor.dtype)

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
    """Exchanges through memory that all ranks can read. A rank writes its rows, all ranks wait, and each reads.

    The waits are torch's barriers between GPUs. Nothing waits on the host, so that graphs can hold an exchange. All
    exchanges of a group use one memory, and must be on one stream.

    If a rank raises in the middle of an overlapped exchange, or in the `write` of `lay_down`, its next exchange would
    not match the other ranks'. So it raises a RuntimeError from then on. The other ranks wait until its process ends or
    their group times out.
    """

    name = "peer"
    _broken = ""  # the message of an error in the middle of an exchange

    def __init__(self, group: Any, device: torch.device, multiprocessors: int = 0) -> None:
        """`multiprocessors`: the smallest count of all ranks' GPUs if exchanges may overlap with GEMMs, else 0."""
        self._group, self._device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._others = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._milliseconds = int(comm.timeout_of(group, device).total_seconds() * 1000)
        self._capacity, self._held = 0, list[Tensor]()
        self._handle: Any = None
        self._views: dict[Any, list[list[Tensor]]] = {}
        self._side: Any = None  # the stream of copies that overlap with GEMMs
        self._multiprocessors = multiprocessors

    def gather(self, *parts: Tensor, totals: Sequence[Tensor] = ()) -> list[Tensor]:
        parts = tuple(part.contiguous() for part in parts)
        forms = [(part.shape, part.dtype) for part in parts]
        buffers = self._memory(forms + _flat(totals))
        self._wait()  # until the other ranks have read the last exchange
        for buffer, part in zip(buffers[self._rank], parts, strict=False):
            buffer.copy_(part)
        _lay_down(buffers[self._rank], totals)
        self._wait()  # until they have written
        gathered = []
        for index, part in enumerate(parts):
            whole = part.new_empty((self._size * part.shape[0], *part.shape[1:]))
            rows = whole.chunk(self._size) if part.numel() else [whole] * self._size
            for rank in self._others:
                rows[rank].copy_(buffers[rank][index])
            rows[self._rank].copy_(part)
            gathered.append(whole)
        return gathered + _totals(buffers, totals)

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
        buffers = self._memory(forms)
        parts = [[t.chunk(self._size) for t in of_rank] for of_rank in buffers]
        mine, rank = parts[self._rank], self._rank
        self._wait()
        rows = whole.chunk(self._size)
        for other in self._others:
            mine[0][other].copy_(rows[other])
        if factor is not None:
            buffers[rank][1].copy_(factor)
        self._wait()
        terms = [rows[rank] if r == rank else parts[r][0][rank] for r in range(self._size)]
        total = sum_rows(terms, None if added is None else added.contiguous(), whole.dtype)
        if factor is None:
            return total, None
        return total, sum_rows([of_rank[1][rank] for of_rank in parts], None, factor.dtype)

    def total(self, *parts: Tensor) -> list[Tensor]:
        return self.gather(totals=parts) if parts else []

    def lay_down(
        self, shape: torch.Size, dtype: torch.dtype, write: Callable[[Tensor], None]
    ) -> list[Tensor]:
        buffers = [buffer for (buffer,) in self._memory([(shape, dtype)])]
        self._wait()  # until the other ranks have read the last exchange
        with self._breaking_off():
            write(buffers[self._rank])
        self._wait()  # until they have written
        return buffers

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
        """The middle of an exchange: an error inside ends all later exchanges.

        An error while a graph is captured does not: the captured exchange has not run.
        """
        before = self._broken
        try:
            yield
        except BaseException as error:
            self._broken = before or str(error) or type(error).__name__
            with suppress(RuntimeError):  # of a failed capture or device: `error` has the reason
                if torch.cuda.is_current_stream_capturing():
                    self._broken = before
            raise

    def _memory(self, forms: list[tuple[torch.Size, torch.dtype]]) -> list[list[Tensor]]:
        """For each rank, one tensor per shape and dtype in its memory, which grows if it is too small."""
        self._refuse_if_broken()
        key = tuple(forms)
        views = self._views.pop(key, None) or self._lay_out(forms)
        self._views[key] = views  # last, so that the first entry is the least recently used
        if len(self._views) > MOST_VIEWS:
            del self._views[next(iter(self._views))]
        return views

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RuntimeError(
                f"an exchange of rows broke off on this rank ({self._broken}), and other ranks are still in it: end "
                "the process on all ranks"
            )

    def _lay_out(self, forms: list[tuple[torch.Size, torch.dtype]]) -> list[list[Tensor]]:
        starts, end = [], 0
        for shape, dtype in forms:
            starts.append(end // dtype.itemsize)
            end += aligned(shape.numel() * dtype.itemsize)
        # The handle has the barriers, which empty exchanges need, too.
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
        """Allocate larger memory. The older one is kept, since graphs may use it."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"an exchange needs {wanted} bytes, and {self._capacity} are allocated: run the step eagerly "
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
    """PeerRows' exchanges that overlap with GEMMs. A rank writes rows into the memory of the rank that needs them.

    Copy engines send the rows on a stream of their own, which leaves the multiprocessors to the GEMM. R-wide factors
    are sent before the GEMM, as their kernel would have to wait for it. The stream also joins if it is captured.

    Ranks cannot deadlock. Only barriers depend on another rank. They are on the GEMMs' stream alone, all ranks have the
    same number of them, and none runs at the same time as a GEMM, whose blocks may hold all multiprocessors. Copies
    depend on their own rank's streams only.
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
        rows, rank, size = parts[0].shape[0], peers._rank, peers._size
        forms = [(torch.Size([size * rows, *part.shape[1:]]), part.dtype) for part in parts]
        buffers = peers._memory(forms + _flat(totals))
        mine, here = buffers[rank], slice(rank * rows, (rank + 1) * rows)
        peers._wait()  # until the other ranks have multiplied the last exchange
        small = [(buffers[r][i][here], p) for i, p in enumerate(parts) if i for r in range(size)]
        if small:
            torch._foreach_copy_([target for target, _ in small], [part for _, part in small])
        _lay_down(mine, totals)
        with self._at_once():
            self._send([(buffers[other][0][here], parts[0]) for other in peers._others])
            product(here, parts)
            self._join()
        peers._wait()  # until they have written
        factors = [whole.clone() for whole in mine[1 : len(parts)]]
        for piece in (slice(0, here.start), slice(here.stop, size * rows)):
            if piece.start < piece.stop:
                product(piece, [mine[0][piece], *(factor[piece] for factor in factors)])
        return factors + _totals(buffers, totals)

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
            buffers, sent = self._others_rows(product, rows, factor, forms)
            mine = product(self._rows(rows)).contiguous()
            self._join()
        total = self._added_up(mine, buffers, added)
        del sent
        if factor is None:
            return total, None
        return total, sum_rows([*buffers[self._peers._rank][1]], None, factor.dtype)

    def sum_with(
        self, product: Callable[[slice, Tensor | None], Tensor], rows: int, branch: Branch
    ) -> tuple[Tensor, list[Tensor]]:
        self._peers._refuse_if_broken()
        terms, partials, form = branch
        forms = [self._of_a_rank(terms), *([] if form is None else [form])]
        with self._at_once():
            buffers, sent = self._others_rows(lambda part: product(part, None), rows, terms, forms)
            here = buffers[self._peers._rank]
            self._peers._wait()  # until the other ranks' factors are here, which are sent before their rows
            factor = sum_rows([*here[1]], None, terms.dtype)
            totals = partials(factor)
            _lay_down(here, totals)
            mine = product(self._rows(rows), factor).contiguous()
            self._join()
        total = self._added_up(mine, buffers, None)
        del sent
        return total, _totals(buffers, totals)

    def _rows(self, rows: int, step: int = 0) -> slice:
        """The slice of `rows` that rank (this rank + step) mod size owns."""
        peers, part = self._peers, rows // self._peers._size
        rank = (peers._rank + step) % peers._size
        return slice(rank * part, (rank + 1) * part)

    def _of_a_rank(self, factor: Tensor) -> tuple[torch.Size, torch.dtype]:
        """Shape [ranks, rows of one rank, …] and dtype of the buffer into which all ranks write their `factor`."""
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

        Returns (each rank's buffers: the rows [ranks, M, N], then one per `forms`; the tensors that copy engines still
        read, which must be kept until `_join`).
        """
        peers, buffers, sent = self._peers, list[list[Tensor]](), list[Tensor]()
        for step, rank in enumerate(peers._others, 1):
            part = product(self._rows(rows, step)).contiguous()
            if not buffers:
                every = (torch.Size([peers._size, *part.shape]), part.dtype)
                buffers = peers._memory([every, *forms])
                peers._wait()  # until the other ranks have added up the last exchange
                self._spread(buffers, factor)
            self._send([(buffers[rank][0][peers._rank], part)])
            sent.append(part)
        return buffers, sent

    def _added_up(self, mine: Tensor, buffers: list[list[Tensor]], added: Tensor | None) -> Tensor:
        """The sum of this rank's rows over the ranks. `mine` is this rank's term."""
        self._peers._wait()  # until the other ranks have written their terms
        rank = self._peers._rank
        terms = [mine if r == rank else buffers[rank][0][r] for r in range(self._peers._size)]
        return sum_rows(terms, None if added is None else added.contiguous(), mine.dtype)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """The GEMMs and copies of an exchange. An error inside waits for the copies, and ends all later exchanges."""
        with self._peers._breaking_off():
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # as in `_breaking_off`
                    self._join()  # before the memory that copies read is reused
                raise

    def _spread(self, buffers: list[list[Tensor]], factor: Tensor | None) -> None:
        """Write each rank's rows of `factor` into its memory."""
        if factor is not None:
            targets = [of_rank[1][self._peers._rank] for of_rank in buffers]
            torch._foreach_copy_(targets, [*factor.chunk(self._peers._size)])

    def _send(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        side = self._peers._side
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            for target, part in copies:
                target.copy_(part, non_blocking=True)

    def _join(self) -> None:
        side = self._peers._side
        torch.cuda.current_stream(side.device).wait_stream(side)


def aligned(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes in the ranks' shared memory."""
    return -(-size // _ALIGNED) * _ALIGNED


def _flat(totals: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of `totals` as one flat tensor: of their dtype, or of fp32 if they have several."""
    if not totals:
        return []
    dtypes = {part.dtype for part in totals}
    size = sum(part.numel() for part in totals)
    return [(torch.Size([size]), dtypes.pop() if len(dtypes) == 1 else torch.float32)]


def _lay_down(buffers: list[Tensor], totals: Sequence[Tensor]) -> None:
    """Copy `totals` to the last of a rank's `buffers`, in one launch."""
    if totals:
        flat = buffers[-1].split([part.numel() for part in totals])
        torch._foreach_copy_(
            [f.view(part.shape) for f, part in zip(flat, totals, strict=True)], [*totals]
        )


def _totals(buffers: list[list[Tensor]], totals: Sequence[Tensor]) -> list[Tensor]:
    """Each of `totals` summed over the ranks, which all add in the same order."""
    if not totals:
        return []
    flat = [of_rank[-1] for of_rank in buffers]
    sums = sum_rows(flat, None, flat[0].dtype).split([part.numel() for part in totals])
    return [f.view(part.shape).to(part.dtype) for f, part in zip(sums, totals, strict=True)]


def row_exchange(
    transport: str,
    group: Any,
    device: torch.device,
    overlap: bool | None = False,
) -> tuple[RowExchange, str]:
    """Collective: (how ranks exchange rows, the reason for messages).

    With `overlap` None, exchanges overlap with GEMMs where all ranks can do so and it gains time. True raises if not
    all ranks can.

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
    overlaps = f"no overlap: {why_not}" if why_not else "overlapped with GEMMs of fused FP8 layers"
    return PeerRows(group, device, multiprocessors), f"{why}; {overlaps}"


def _of_all(group: Any, device: torch.device) -> tuple[int, str]:
    """Collective: (the smallest number of multiprocessors, ""), or (0, why a rank cannot multiply rows in pieces).

    All ranks overlap or none: overlapped exchanges lay rows out differently in the ranks' memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    mine = multiprocessors_of(index), why_not_wgmma(capability_of(device)) or ""
    every = comm.agree(group, mine)
    for rank, (_, why_not) in enumerate(every):
        if why_not:
            return 0, f"rank {rank}: {why_not}"
    return min(count for count, _ in every), ""
