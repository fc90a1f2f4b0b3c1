"""PowerGossip: ranks average their models with those of their neighbors in a graph, by products with a few vectors.

**The paper** (Vogels, Karimireddy and Jaggi 2020, arXiv 2008.01425). Each rank steps on its own gradient. Then it
exchanges low-rank approximations of the difference of models with each neighbor: products of the weight matrices with a
vector, which a power iteration over steps improves. Ranks never form a sum over all of them.

**Here** it is the paper's algorithm, with no second form:

- Models are exchanged after the first step, too.
- A vector along which two models do not differ at all is replaced by a random one.
- Vectors are made orthonormal by a QR decomposition in float64.
- Weights are those of Metropolis; a graph need not be regular.

`gossip_rounds` has the algorithm on flat arrays.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.arrays import WORK_DTYPES, ArraySpec
from mpicomp.errors import ConfigurationError
from mpicomp.reducer.agreement import Signature, agree, run_collectively
from mpicomp.rounds import Graph, Rounds, make_graph
from mpicomp.setting_checks import check_least
from mpicomp.systems.optimizers.gossip_rounds import Gossip
from mpicomp.torch.arguments import as_real, check_kind
from mpicomp.torch.collective_optimizer import CollectiveOptimizer, refuse_join
from mpicomp.torch.optimizer_proxy import Arguments, OptimizerProxy, UpdatingProxy, wrap
from mpicomp.torch.states import to_arrays, to_tensors
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect


def PowerGossip(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer,
    graph: str | Iterable[tuple[int, int]] = "ring",
    rank: int = 1,
    iterations: int = 1,
    rate: float = 1.0,
    *,
    seed: int = 0,
    comm: Any = None,
) -> Any:
    """Make an optimizer average its parameters with those of neighboring ranks after every step.

    Each rank steps on its own gradient. Then it exchanges with its neighbors products of its weight matrices with a few
    vectors, and both take a part of the difference along these. Models are near each other, not the same; their mean is
    what it would be without the exchange, to rounding.

    Collective over ``comm``, as are the steps of the optimizer that it returns: all ranks step together.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any. Its state, such as momenta, stays on its rank, and so do buffers of modules.
    graph : {"ring", "torus"} or iterable of (int, int)
        Edges: a ring, a torus with sides as equal as the number of ranks has divisors, or pairs of ranks. The graph
        must be connected.
    rank : int
        Vectors for each matrix and neighbor. A parameter is the matrix of its first dimension against all others. One
        with a single dimension, and a matrix that is no larger than its factors, is exchanged as it is. A complex
        parameter has a last dimension of 2 more, for pairs of reals.
    iterations : int
        Exchanges in a step.
    rate : float
        In (0, 1]: multiplies the weights of the graph, ``1 / (1 + neighbors)`` of the rank of an edge that has more.
    seed : int
        Seed of the first vectors, the same on all ranks.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.

    Returns
    -------
    torch.optim.Optimizer
        The same optimizer, of a class derived from its own: schedulers, hooks and steps of its object work as before.
        It has ``transport``; ``rounds(closure)``, its step as a generator of rounds; and ``close()``, after which it
        can be wrapped again. Its ``state_dict()`` has this rank's vectors under ``"mpicomp"``: with them training
        continues as if it had never stopped. On another graph it starts with new ones.

    Raises
    ------
    ConfigurationError
        For a graph or a setting that is not allowed.
    DisagreementError
        At the first step, where ranks have different parameters, settings or numbers of steps.
    NonFiniteError
        From ``step``, on a rank whose model is not finite and on its neighbors. Their local steps were made then.

    Notes
    -----
    In each exchange a matrix costs ``rank`` times its rows, or its columns: they alternate. 16-bit parameters are
    averaged in float32 and rounded.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.transport import LocalWorld
    >>> world = LocalWorld(3)
    >>> models = [torch.nn.Linear(8, 8) for _ in range(3)]
    >>> optimizers = [
    ...     PowerGossip(torch.optim.SGD(model.parameters(), lr=0.0), comm=end)
    ...     for model, end in zip(models, world.transports)
    ... ]
    >>> for _ in range(100):
    ...     steps = world.run([optimizer.rounds() for optimizer in optimizers])
    >>> torch.allclose(models[0].weight, models[2].weight, atol=1e-4)
    True
    """
    transport = connect(comm)

    def make() -> Graph:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"PowerGossip: a torch optimizer is needed, got {type(optimizer).__name__}")
        closed = isinstance(optimizer, _Gossiping) and optimizer._mpicomp_models.closed
        if isinstance(optimizer, CollectiveOptimizer | OptimizerProxy) and not closed:
            raise ConfigurationError(
                f"PowerGossip: {type(optimizer).__name__} exchanges already; pass a plain optimizer"
            )
        for name, value in (("rank", rank), ("iterations", iterations)):
            check_least("PowerGossip", name, value)
        if not isinstance(rate, (int, float)) or not 0 < rate <= 1:
            raise ConfigurationError(f"PowerGossip: rate must be above 0 and at most 1, got {rate!r}")
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad:
                check_kind(str(place), parameter, "PowerGossip")
        edges: Any = list(graph) if isinstance(graph, Iterable) and not isinstance(graph, str) else graph
        if isinstance(graph, torch.nn.Module) or (isinstance(edges, list) and any(map(_is_parameter, edges))):
            raise ConfigurationError(
                "PowerGossip: the second argument is the graph, 'ring', 'torus' or pairs of ranks, got parameters of a "
                "model; it needs no names: leave named_parameters out"
            )
        return make_graph(edges, transport.group.size)

    try:
        checked_graph = run_collectively(make, transport, "PowerGossip")
    except BaseException:
        if transport is not comm:
            transport.close()
        raise
    if transport is not comm:
        transport.log.clear()  # of its steps alone
    wrapped = wrap(optimizer, _Gossiping, "Gossiping")
    wrapped.transport = transport
    settings = {"rank": rank, "iterations": iterations, "rate": float(rate), "seed": seed}
    wrapped._mpicomp_models = _Models(checked_graph, transport, transport is not comm, settings)
    return wrapped


def _is_parameter(edge: Any) -> bool:
    return isinstance(edge[-1] if isinstance(edge, tuple) and edge else edge, torch.Tensor)


class _Gossiping(UpdatingProxy):
    """Mixin that `PowerGossip` puts in front of an optimizer's class: it exchanges after every step."""

    transport: Transport
    param_groups: list[dict[str, Any]]
    _mpicomp_models: "_Models"

    def _mpicomp_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if hasattr(self, "found_inf"):
            raise ConfigurationError(
                "PowerGossip: gradients that a GradScaler has scaled cannot be served; use torch.autocast with "
                "bfloat16, which needs no scaler"
            )
        return args, kwargs

    def _mpicomp_after(self) -> None:
        if self._mpicomp_exchanges:
            self.transport.run(self._mpicomp_rounds())

    def _mpicomp_rounds(self) -> Rounds[None]:
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return self._mpicomp_models.average(parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # On all ranks; names are not needed
        super(OptimizerProxy, self).add_param_group(param_group)  # type: ignore[misc]

    def join(self) -> NoReturn:
        refuse_join("PowerGossip")

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state | {"mpicomp": to_tensors(self._mpicomp_models.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # A result of the plain optimizer, too; on all ranks
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})  # type: ignore[misc]
        self._mpicomp_models.load_state_dict(to_arrays(state_dict.get("mpicomp", {})))

    def close(self) -> None:
        """Release its MPI resources. It waits for nobody; a second call does nothing."""
        self._mpicomp_models.close()


class _Models:
    """A rank's parameters as one flat array, which is averaged with those of its neighbors."""

    def __init__(self, graph: Graph, transport: Transport, owned: bool, settings: dict[str, Any]) -> None:
        self._graph = graph
        self._transport = transport
        self._owned = owned
        self._settings = settings
        self._members: list[ArraySpec] = []
        self._gossip: Gossip | None = None
        self._kept: Mapping[str, Any] = {}
        self._flat: NDArray[np.floating] = np.empty(0)
        self.closed = False

    def average(self, parameters: list[torch.Tensor]) -> Rounds[None]:
        """Average with the neighbors, as rounds."""
        reals = [as_real(parameter.detach()) for parameter in parameters]
        shapes = [
            tuple(real.shape) if parameter.dim() > 1 or not parameter.is_complex() else (real.numel(),)
            for real, parameter in zip(reals, parameters, strict=True)
        ]
        members = [
            ArraySpec(str(place), str(real.dtype).removeprefix("torch."), shape)
            for place, (real, shape) in enumerate(zip(reals, shapes, strict=True))
        ]
        if self._gossip is None or members != self._members:
            yield from self._begin(members)
        assert self._gossip is not None
        views = []
        place = 0
        for real in reals:
            flat = torch.from_numpy(self._flat[place : place + real.numel()])
            views.append(flat.view(real.shape))
            place += real.numel()
        with torch.no_grad():
            for view, real in zip(views, reals, strict=True):
                view.copy_(real)
        for _ in range(self._settings["iterations"]):
            yield from self._gossip.rounds(self._flat)
        with torch.no_grad():
            for view, parameter in zip(views, parameters, strict=True):
                as_real(parameter).copy_(view)

    def state_dict(self) -> dict[str, Any]:
        if self._gossip is None:
            return dict(self._kept)
        return {"graph": self._edges()} | self._gossip.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # It is restored at the next step
        self._kept, self._gossip = state, None

    def close(self) -> None:
        self.closed = True
        if self._owned:
            self._transport.close()

    def _begin(self, members: list[ArraySpec]) -> Rounds[None]:
        """Check that all ranks have the same settings and parameters, and make the exchange."""
        problem = None
        for member in members:  # also of parameters that were added to a group later
            if member.dtype not in WORK_DTYPES:
                problem = ConfigurationError(
                    f"PowerGossip: parameters must be one of {', '.join(WORK_DTYPES)}, or complex, and parameter "
                    f"{member.name} is {member.dtype}"
                )
        group = self._transport.group
        turn = self._kept.get("turn", 0)
        settings = self._settings | {"graph": self._edges(), "turn": turn}
        yield from agree(Signature(settings, members), problem, group, "PowerGossip")
        wide = any(member.work_dtype == np.float64 for member in members)
        dtype = np.dtype(np.float64 if wide else np.float32)
        shapes = [member.shape for member in members]
        rank, rate, seed = (self._settings[name] for name in ("rank", "rate", "seed"))
        self._gossip = Gossip(self._graph, group.rank, shapes, dtype, rank, rate, seed)
        if self._kept and [list(edge) for edge in self._kept["graph"]] == self._edges():
            self._gossip.load_state_dict(self._kept)
        self._kept = {}
        self._members = members
        self._flat = np.empty(sum(member.numel for member in members), dtype)

    def _edges(self) -> list[list[int]]:
        return [list(edge) for edge in sorted(self._graph.edges)]
