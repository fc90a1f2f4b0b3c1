"""Hooks of a compressor that `Compressor.bind` has replaced: they still work, with a warning."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mpicomp.compressors.base import Compressor

_HOOKS = ("within_model", "within", "of_length", "settled")


class OldHooks:
    """Answers the old hooks by `bind`, and gives a class that defines them a `bind` that asks them."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        own = {name for name in _HOOKS if name in vars(cls)}
        if not own or "bind" in vars(cls):
            return
        _warn(f"{cls.__name__}.{min(own)}")

        def bind(
            self: Any,
            names: Sequence[str],
            sizes: Sequence[int],
            shapes: Sequence[tuple[int, ...]] = (),
            *,
            model: Mapping[str, int] | None = None,
            warm_up: bool = True,
        ) -> Any:
            made = self
            if not warm_up and "settled" in own:
                made = made.settled
            if model is not None and "within_model" in own:
                made = made.within_model(list(model), list(model.values()))
            if "within" in own:
                return made.within(names, sizes, shapes)
            return super(cls, made).bind(names, sizes, shapes, model=model, warm_up=warm_up)  # type: ignore[misc]

        cls.bind = bind  # type: ignore[attr-defined]

    @property
    def settled(self) -> "Compressor":
        """Use ``bind(names, sizes, shapes, warm_up=False)``."""
        _warn("settled")
        return self._as_compressor.bind([], [], warm_up=False)

    def within_model(self, names: Sequence[str], sizes: Sequence[int]) -> "Compressor":
        """Use ``bind(..., model=sizes)``."""
        _warn("within_model")
        return self._as_compressor.bind([], [], model=dict(zip(names, sizes, strict=True)))

    def within(
        self, names: Sequence[str], sizes: Sequence[int], shapes: Sequence[tuple[int, ...]] = ()
    ) -> "Compressor":
        """Use `bind`."""
        _warn("within")
        return self._as_compressor.bind(names, sizes, shapes)

    def of_length(self, numel: int) -> "Compressor":
        """Use `bind` with the shapes of the other array."""
        _warn("of_length")
        return self._as_compressor.bind([""], [numel])

    @property
    def _as_compressor(self) -> "Compressor":
        return cast("Compressor", self)


def _warn(name: str) -> None:
    warnings.warn(f"{name} is now a part of Compressor.bind(names, sizes, shapes)", DeprecationWarning, stacklevel=3)
