"""Lend whole matrices to one owner each for the length of a step, and take the results back.

    lend(updates, lambda matrices, values: [inverse_root(value) for value in values])

`updates` are DTensors of any placement; every matrix in them is computed once, whole, by one rank, and the result
replaces it. `Lender` is the same with the preparation kept: build it once, call it every step.

    bucket 0   out ──► compute ──► back
    bucket 1       out ──────────────► compute ──► back
    bucket 2                               out ────────► ...

While a bucket is computed the next one travels. At most two buckets are on this rank at a time, each with what is sent
and what is received. A matrix that lies whole at its owner is handed over as a view of local memory: it does not
travel, and it is not copied unless a cast is asked for; `compute` must not change its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_fsdp.errors import VescaleError

from .holdings import unflattened
from .matrices import Matrix
from .notes import Agreement, Turn
from .orthogonalize import NewtonSchulz
from .passage import Chunks, Hop, Passage
from .route import Bucket, Route
from .terms import Reorder, Replicas, Terms, default_matrices

__all__ = ["BUCKET_NBYTES", "Lender", "Replicas", "Run", "flat_local", "lend"]

BUCKET_NBYTES = 64 * 2**20

Compute = Callable[[Sequence[Matrix], list[Tensor]], Sequence[Tensor]]
Read = Callable[[Sequence["Run"]], Sequence[Tensor]]
Write = Callable[[Sequence["Run"], Sequence[Tensor]], None]


class Run(NamedTuple):
    """This rank's part of `matrix`: `numel` elements of tensor `matrix.tensor`'s flat local memory, from `start` on."""

    matrix: Matrix
    start: int
    numel: int

    def of(self, flat_local: Tensor) -> Tensor:
        return flat_local.narrow(0, self.start, self.numel)


def lend(
    tensors: Sequence[Tensor],
    compute: Compute,
    *,
    matrices: Sequence[Matrix] | None = None,
    owners: Sequence[int] | None = None,
    bucket_nbytes: int = BUCKET_NBYTES,
    replicas: Replicas = Replicas.REPEAT,
) -> None:
    """Replace every whole matrix of `tensors` by what `compute` makes of it, computed by one rank.

    tensors: DTensors on one mesh, of one dtype, in any placements but Partial; or plain tensors, which every rank
        computes for itself. They are written in place.
    compute: called once per bucket with the matrices that this rank owns and their values, shape (rows, columns); it
        returns as many results of the same shapes and leaves its arguments unchanged.
    matrices: default, see `matrices_of`: one for a 2-d tensor or convolution, E for a stack (E, M, N).
    owners: one rank per matrix, numbered row-major over the mesh axes that are travelled (`Lender.axes`); default,
        `select_owners`.

    Raises ValueError for tensors that do not go together.
    """
    lender = Lender(tensors, matrices, owners=owners, bucket_nbytes=bucket_nbytes, replicas=replicas)
    flat = [flat_local(tensor, f"tensors[{index}]") for index, tensor in enumerate(tensors)]

    def read(runs: Sequence[Run]) -> list[Tensor]:
        return [run.of(flat[run.matrix.tensor]) for run in runs]

    def write(runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        for run, result in zip(runs, results, strict=True):
            run.of(flat[run.matrix.tensor]).copy_(result)

    lender(read, compute, write)


class Lender:
    """Routes and owners for tensors like `tensors`, prepared once. See `lend`.

    dtype: in which elements travel, both ways; default, the tensors' own (which must then be one).
    names: the tensors' fqns, for errors.
    cost: what a matrix costs its owner; default, the operations of five Newton-Schulz steps.
    reorder: a last word on the chosen owners.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        matrices: Sequence[Matrix] | None = None,
        *,
        owners: Sequence[int] | None = None,
        cost: Callable[[Matrix], int] | None = None,
        reorder: Reorder | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        dtype: torch.dtype | None = None,
        replicas: Replicas = Replicas.REPEAT,
        names: Sequence[str] | None = None,
    ) -> None:
        self.names = tuple(names) if names is not None else tuple(f"tensors[{i}]" for i in range(len(tensors)))
        self.dtype = dtype if dtype is not None else _one_dtype(tensors, self.names)
        self.matrices = tuple(matrices) if matrices is not None else default_matrices(tensors, self.names)
        self.terms = Terms.of(
            tensors,
            self.matrices,
            self.names,
            replicas=replicas,
            cost=cost if cost is not None else _newton_schulz_flops,
            owners=owners,
            reorder=reorder,
        )
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._place = self.terms.place
        bucket_numel = max(1, bucket_nbytes // self.dtype.itemsize)
        self.route = Route(self.terms.loans, self.terms.outbound, self._place.sizes, self._place.here, bucket_numel)
        self._anything_travels = any(any(b.goes_out) or any(b.comes_back) for b in self.route.buckets)
        self._hops = [self._hops_of(bucket) for bucket in self.route.buckets]
        self._agreement = Agreement(self.names, self._held())

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes along which matrices travel, in mesh order."""
        return self._place.axes

    @property
    def num_buckets(self) -> int:
        return len(self.route.buckets)

    def explain(self) -> str:
        """Where matrices are computed and what travels, in one line."""
        loans, loads = self.terms.loans, self.terms.loads
        stay = sum(loan.keys == (loan.owner,) for loan in loans)
        mean = sum(loads) / len(loads)
        balance = f"largest load {max(loads) / mean:.3f} x mean" if mean else "no load"
        return (
            f"{len(loans)} matrices of {len(self.names)} tensors over {len(loads)} ranks: {stay} lie whole at their "
            f"owner; {self.num_buckets} buckets of {self.route.bucket_numel} elements ({self.dtype}); {balance}"
        )

    @torch.no_grad()
    def __call__(
        self,
        read: Read,
        compute: Compute,
        write: Write,
        *,
        absent: frozenset[int] = frozenset(),
        failure: Exception | None = None,
    ) -> frozenset[int]:
        """Lend all matrices once; `read` gives this rank's runs (1-d), `write` takes their results.

        absent: tensors that this rank has nothing for (a parameter without gradient). They are passed over: not
        computed, not written, and returned, provided that all holders of the tensor agree.
        failure: an error that this rank has met on the way here; nothing is written then.

        Raises VescaleError on all ranks, before anything is written, when some have a tensor and others do not. What
        `read`, `compute` or `write` raise on one rank is raised there once the others have been told with the next
        matrices, and they raise VescaleError; buckets before that one are written.
        """
        turn = Turn(absent, failure)
        out = self._depart(0, read, turn) if self.route.buckets else None
        back: Passage | None = None
        for index in range(self.num_buckets):
            assert out is not None
            chunks = self._arrive(out, turn)
            if index == 0 and self._anything_travels:
                assert out.notes is not None
                turn.conclude()  # all ranks have heard the same
                turn.absent = self._agreement.settle(out.notes[1:], turn.absent)
            if back is not None:  # before the next bucket sets out: two are here at a time, not three
                self._deliver(index - 1, self._arrive(back, turn), write, turn)
                back = None  # and what it brought is let go
            out = self._depart(index + 1, read, turn) if index + 1 < self.num_buckets else None
            back = self._passage(self._hops[index][1], self._compute(index, chunks, compute, turn), turn)
        if back is not None:
            self._deliver(self.num_buckets - 1, self._arrive(back, turn), write, turn)
        turn.conclude()
        return turn.absent

    def _hops_of(self, bucket: Bucket) -> tuple[list[Hop], list[Hop]]:
        """The bucket's collectives: outbound, and on the way back. All ranks leave out the same empty ones."""
        loans, here, sizes = self.route.loans, self._place.here, self._place.sizes
        is_first = bucket is self.route.buckets[0]
        all_vote = is_first and self._anything_travels
        num_notes = 1 + len(self.names) if all_vote else 1
        out, back = [], []
        for position, axis in enumerate(self.route.axes):
            assert self._place.mesh is not None
            group = self._place.mesh.get_group(self._place.axes[axis])
            if all_vote or bucket.goes_out[position]:
                out.append(Hop.of(bucket.out[position], loans, here, axis, sizes[axis], group, num_notes))
            if bucket.comes_back[position]:
                back.append(Hop.of(bucket.back[position], loans, here, axis, sizes[axis], group, 1))
        return out, back[::-1]

    def _held(self) -> frozenset[int]:
        return frozenset(loan.matrix.tensor for loan in self.route.loans if self._place.here in loan.holdings)

    def _runs(self, index: int) -> list[tuple[int, Run]]:
        """This rank's runs of a bucket, by loan number."""
        runs = []
        for number in self.route.buckets[index].loans:
            loan = self.route.loans[number]
            held = loan.holdings.get(self._place.here)
            if held is not None:
                runs.append((number, Run(loan.matrix, held.start, held.numel)))
        return runs

    def _depart(self, index: int, read: Read, turn: Turn) -> Passage:
        """Bucket `index` sets out: this rank's runs of it, zeros for what is absent."""
        here = self._place.here
        mine = [(number, run) for number, run in self._runs(index) if self.route.loans[number].key(here) == here]
        present = [(number, run) for number, run in mine if run.matrix.tensor not in turn.absent]

        def values() -> Chunks:
            found = read([run for _, run in present]) if present else []
            return {(number, here): value for (number, _), value in zip(present, found, strict=True)}

        chunks: Chunks = turn.attempt(values, dict)
        for number, run in mine:
            if (number, here) not in chunks:
                chunks[number, here] = self._zeros(run.numel)
        asks = index == 0 and self._anything_travels
        return self._passage(self._hops[index][0], chunks, turn, self._agreement.votes(turn.absent) if asks else ())

    def _compute(self, index: int, chunks: Chunks, compute: Compute, turn: Turn) -> Chunks:
        """Put this rank's matrices together, compute, and cut the results into the holders' runs."""
        loans = self.route.loans
        owned = [number for number in self.route.buckets[index].loans if loans[number].owner == self._place.here]
        wanted = [number for number in owned if loans[number].matrix.tensor not in turn.absent]
        matrices = [loans[number].matrix for number in wanted]

        def results() -> Chunks:
            values = [self._whole(number, chunks) for number in wanted]
            found = list(compute(matrices, values)) if wanted else []
            _check_results(matrices, found, self.names)
            cut = (self._cut(number, result) for number, result in zip(wanted, found, strict=True))
            return {key: run for runs in cut for key, run in runs.items()}

        def nothing() -> Chunks:
            keys = ((number, key) for number in wanted for key in loans[number].keys)
            return {(number, key): self._zeros(loans[number].holdings[key].numel) for number, key in keys}

        return chunks | turn.attempt(results, nothing)

    def _whole(self, number: int, chunks: Chunks) -> Tensor:
        loan = self.route.loans[number]
        parts = [(loan.holdings[key], chunks.pop((number, key)).to(self.dtype)) for key in loan.keys]
        if all(held.begin is not None for held, _ in parts):
            parts.sort(key=lambda part: part[0].begin or 0)
            flat = parts[0][1] if len(parts) == 1 else torch.cat([chunk for _, chunk in parts])
            return flat.view(loan.matrix.shape)
        whole = torch.empty(loan.matrix.shape, dtype=self.dtype, device=self._place.device)
        for held, chunk in parts:
            held.scatter(chunk, whole.view(unflattened(loan.matrix, self._shapes[loan.matrix.tensor])))
        return whole

    def _cut(self, number: int, result: Tensor) -> Chunks:
        loan = self.route.loans[number]
        flat = result.contiguous().view(-1)
        whole = flat.view(unflattened(loan.matrix, self._shapes[loan.matrix.tensor]))
        runs = {}
        for key in loan.keys:
            held = loan.holdings[key]
            if held.begin is not None:
                runs[number, key] = flat.narrow(0, held.begin, held.numel)
                continue
            runs[number, key] = flat.new_empty(held.numel)
            held.collect(whole, runs[number, key])
        return runs

    def _passage(self, hops: Sequence[Hop], chunks: Chunks, turn: Turn, votes: Sequence[int] = ()) -> Passage:
        return Passage(hops, chunks, turn.notes(votes, self.dtype, self._place.device)).start()

    def _arrive(self, passage: Passage, turn: Turn) -> Chunks:
        chunks = passage.finish()
        turn.hear(passage.notes)
        return chunks

    def _deliver(self, index: int, chunks: Chunks, write: Write, turn: Turn) -> None:
        mine = [(number, run) for number, run in self._runs(index) if run.matrix.tensor not in turn.absent]
        here = self._place.here
        results = [chunks[number, self.route.loans[number].key(here)] for number, _ in mine]
        if mine:
            turn.attempt(lambda: write([run for _, run in mine], results), lambda: None)

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.dtype, device=self._place.device)


def flat_local(tensor: Tensor, name: str) -> Tensor:
    """This rank's elements as a 1-d view. Raises VescaleError if they are not contiguous."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_contiguous():
        raise VescaleError(
            f"{name}: expected contiguous local memory, got strides {local.stride()}. Make it contiguous."
        )
    return local.detach().view(-1)


def _newton_schulz_flops(matrix: Matrix) -> int:
    return NewtonSchulz().flops(*matrix.shape)


def _one_dtype(tensors: Sequence[Tensor], names: Sequence[str]) -> torch.dtype:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != tensors[0].dtype:
            raise VescaleError(
                f"{name}: expected {tensors[0].dtype} like {names[0]}, got {tensor.dtype}. "
                "Lend tensors of one dtype together, or give the dtype in which they travel."
            )
    return tensors[0].dtype if tensors else torch.float32


def _check_results(matrices: Sequence[Matrix], results: Sequence[Tensor], names: Sequence[str]) -> None:
    if len(results) != len(matrices):
        raise VescaleError(f"compute returned {len(results)} results for {len(matrices)} matrices.")
    for matrix, result in zip(matrices, results, strict=True):
        if tuple(result.shape) != matrix.shape:
            raise VescaleError(
                f"{names[matrix.tensor]}: compute returned shape {tuple(result.shape)} for a matrix of {matrix.shape}."
            )
