"""Fields that ``mpicomp train`` writes and reports read, and from which tables in docs/observability.md are made."""

from typing import Annotated, Any, TypedDict

import msgspec


class Line(msgspec.Struct, kw_only=True, gc=False):
    """Fields of a line of ``--metrics`` that `mpicomp.StepRecord` does not have, or has in another form."""

    schema: Annotated[int, "version of this table, 1; it changes when a field changes its meaning or goes"] = 1
    seconds: Annotated[float, "the whole step: gradient to update"]
    phases_s: Annotated[dict[str, float], "parts of `seconds`, below"]
    loss: Annotated[
        float | None, "training loss on this rank's batch, before the update; null where it is not finite"
    ] = None
    quality: Annotated[
        float | None, "quality on held-out data every `--evaluate-every` steps, else null; not in `seconds`"
    ] = None


class Phases(TypedDict):
    """Parts of the seconds of a step of ``train``."""

    compute: Annotated[float, "forward and backward"]
    compress: Annotated[float, "sum of gradient and residual, selection, message: up to the last round"]
    exchange: Annotated[float, "in the transport; waiting for slower ranks counts here"]
    decode: Annotated[float, "after the last round: the mean from the messages"]
    update: Annotated[float, "clipping and the optimizer"]
    other: Annotated[float, "the rest: copies to and from buckets, the new residual"]


PHASES = tuple(Phases.__annotations__)  # in the order in which they are drawn


class Quality(TypedDict):
    """Quality on held-out data."""

    name: Annotated[str, "such as accuracy"]
    value: Annotated[float, "accuracy from 0 to 1 (`digits`), or nats a token (`text-*`)"]
    better: Annotated[str, "`higher` or `lower`"]


class Ratios(TypedDict):
    """Kept fraction of the whole model in a step."""

    median: Annotated[float, "over steps"]
    least: Annotated[float, "lowest"]
    most: Annotated[float, "highest"]


class PlanEntry(TypedDict):
    """A plan that was run."""

    compressor: Annotated[str, "name of the compressor"]
    compressor_config: Annotated[dict[str, Any], "its configuration"]
    ratio: Annotated[float, "kept fraction that was asked for; 1 where the compressor has none"]
    collective: Annotated[str, "the collective's name"]
    share: Annotated[float, "share of the steps; where there are several buckets, weighted by their elements"]


class RunSettings(msgspec.Struct, kw_only=True):
    """The settings of a training, and the plan that it ran."""

    schema: Annotated[int, "version of this table, 1"] = 1
    task: Annotated[str, "name of the task"]
    shard: Annotated[int, "ranks to a replica of the model, `--shard`: bytes are those that one of them exchanges"]
    compressor: Annotated[
        str,
        "name; with a policy that changes plans this and the next three are of the plan that leads in the second half",
    ]
    compressor_config: Annotated[dict[str, Any], "its configuration"]
    ratio: Annotated[float, "kept fraction; 1 where the compressor has none"]
    collective: Annotated[str, "the collective that ran, or the requested name where several did"]
    policy: Annotated[str, "name of the policy"]
    policy_config: Annotated[dict[str, Any], "its configuration"]
    exchange: Annotated[str, "`gradients`, or `updates`"]
    updates: Annotated[dict[str, Any] | None, "settings of the exchange of updates; null for gradients"]
    lr_scale: Annotated[float, "times the learning rate that the task is tuned for: `--lr-scale`"]
    warmup: Annotated[int | str, "warm-up in exchanges: dense steps, or `ramp:N` for a falling ratio; 0 for none"]
    ranks: Annotated[int, "number of ranks"]
    hosts: Annotated[int, "number of hosts; ranks that share memory are on one"]
    steps: Annotated[int, "number of steps"]
    resumed_at: Annotated[int, "steps that an earlier run made before its checkpoint: `--checkpoints`; 0 for none"]
    seed: Annotated[int, "of the model, the batches and the schemes"]
    parameters: Annotated[int, "elements of the model"]


class RunObject(RunSettings, kw_only=True):
    """The object that ``train --json`` writes; the same on every rank, except for the quality, which rank 0 has."""

    quality: Annotated[Quality, "that of the model on held-out data, below"]
    median_step_s: Annotated[float, "a step"]
    phases_s: Annotated[dict[str, float], "medians of the parts of a step; they do not add up to `median_step_s`"]
    choosing_s: Annotated[float, "for choosing plans and learning from them, mean over steps; part of `other`"]
    exchange_s: Annotated[
        float | None,
        "one exchange without waiting: `compress` and `decode` of the steps (the second half where plans change), "
        "and rounds probed after the training",
    ]
    dense_exchange_s: Annotated[float | None, "one whole dense exchange, probed after the training"]
    dense_collective: Annotated[str | None, "the dense collective that was fastest there"]
    dense_step_s: Annotated[float | None, "estimate of a step with dense exchange, which the verdict uses"]
    slowest_rank: Annotated[int | None, "the rank whose steps without `exchange` take longest; null with one rank"]
    slowest_costs_s: Annotated[float | None, "mean by which its steps take longer than those of the middle rank"]
    gain: Annotated[float | None, "mean of the buckets' gains"]
    delay: Annotated[
        float | None,
        "energy that waits over energy that a step sends, in the second half: "
        "`sum((1 - gain) * energy) / sum(gain * energy)`; null without error feedback",
    ]
    ratios: Annotated[Ratios, "kept fraction of the whole model in a step, below"]
    plans: Annotated[list[PlanEntry], "the plans that ran, the most frequent one first, below"]
    sent_bytes: Annotated[int, "payload that a rank handed to the transport"]
    wire_bytes: Annotated[int, "bytes that left a rank"]
    dense_wire_bytes: Annotated[int, "bytes that would have left it in a dense ring"]
    dense_bytes: Annotated[int, "4 x parameters x steps, without those of `resumed_at`"]
    once_bytes: Annotated[
        int, "wire bytes sent once: first parameters, measuring the network, a learned code; not counted above"
    ]
    verdict: Annotated[
        str, "the last line that is printed: seconds and bytes against dense exchange, and the delay"
    ] = ""
