"""The fields of what ``mpicomp train`` writes; the tables in docs/observability.md are made of them."""

from typing import Annotated, Any, TypedDict


class Line(TypedDict):
    """Fields of a line of ``--metrics`` that `mpicomp.StepRecord` does not have, or has in another form."""

    schema: Annotated[int, "version of this table, 1; it changes when a field changes its meaning or goes"]
    seconds: Annotated[float, "the whole step: gradient to update"]
    phases_s: Annotated[dict[str, Any], "parts of `seconds`, below"]
    loss: Annotated[float | None, "training loss on this rank's batch, before the update; null where it is not finite"]
    quality: Annotated[
        float | None,
        "quality on held-out data, with `--evaluate-every N` in every N-th step, else null; tasks on text look at a "
        "quarter of what it is in the end. Not in `seconds`",
    ]


class Phases(TypedDict):
    """Parts of the seconds of a step of ``train``."""

    compute: Annotated[float, "forward and backward"]
    compress: Annotated[float, "sum of gradient and residual, selection, message: up to the last round"]
    exchange: Annotated[float, "in the transport; waiting for slower ranks counts here"]
    decode: Annotated[float, "after the last round: the mean from the messages"]
    update: Annotated[float, "clipping and the optimizer"]
    other: Annotated[float, "what is left: copies to and from buckets, the new residual"]


class Layer(TypedDict):
    """The sent part of a parameter; in a line that of rank 0."""

    name: Annotated[str, "of the parameter"]
    numel: Annotated[int, "elements in it"]
    ratio: Annotated[
        float,
        "kept fraction; of a matrix that travels as thin factors, their elements to its own; 1 where it went "
        "whole; in a line that of this rank",
    ]
    gain: Annotated[
        float | None,
        "share of the energy of this parameter's gradient plus residual that was sent; in a line that of this "
        "rank. null in steps in which the policy did not look at the gradient",
    ]


class Quality(TypedDict):
    """Quality on held-out data."""

    name: Annotated[str, "what was measured"]
    value: Annotated[
        float,
        "`digits`, `vgg`: held-out accuracy, 0 to 1; `text-gpt`, `text-gpt-10m`, `text-lstm`: held-out nats a token",
    ]
    better: Annotated[str, "`higher` or `lower`"]


class Ratios(TypedDict):
    """Kept fraction of the whole model in a step."""

    median: Annotated[float, "over steps"]
    least: Annotated[float, "lowest"]
    most: Annotated[float, "highest"]


class RankEntry(TypedDict):
    """Times of a rank."""

    rank: Annotated[int, "its number, among the ranks that were there in the end"]
    slowest: Annotated[
        float,
        "share of the steps in which this rank was busy longest outside `exchange`, where the others wait for it",
    ]
    phases_s: Annotated[dict[str, Any], "parts of its steps, medians"]


class PlanEntry(TypedDict):
    """A plan that was run."""

    compressor: Annotated[str, "name of the compressor"]
    compressor_config: Annotated[dict[str, Any], "its configuration"]
    ratio: Annotated[float, "kept fraction that was asked for; 1 where the compressor has none"]
    collective: Annotated[str, "the collective's name"]
    share: Annotated[float, "share of the steps; where there are several buckets, weighted by their elements"]


class CorrelationEntry(TypedDict):
    """Correlation of ranks' gradients over a run."""

    every: Annotated[int, "from one look to the next; in steps"]
    looks: Annotated[int, "how many there were; one at a gradient that is not finite does not count"]
    bins: Annotated[int, "of each of the two histograms"]
    whole: Annotated[dict[str, Any] | None, "mean over `layers`, weighted by their elements, below"]
    layers: Annotated[
        list[dict[str, Any]],
        "parameters of at least `bins`² elements, with `name`, `numel`, and the fields below",
    ]


class Common(TypedDict):
    """Correlation of the gradients of two ranks."""

    correlation: Annotated[
        float,
        "Pearson's, element by element: 1 where gradients are alike, 0 where they have no direction in common",
    ]
    information: Annotated[
        float,
        "mutual information of an element, estimated from a histogram of pairs whose bins hold equally many "
        "elements; in nats",
    ]
    control: Annotated[
        float,
        "the same estimate with one of the two in random order: what is found where nothing is shared; in nats",
    ]
    entropy: Annotated[float, "of a histogram by itself, mean of both; in nats"]
    share: Annotated[float, "`information / entropy`, which [LGC](https://arxiv.org/abs/2103.08870) gives as about 0.8"]
    control_share: Annotated[float, "`control / entropy`: what `share` is too high by"]


class RunObject(TypedDict):
    """The object that ``train --json`` writes."""

    schema: Annotated[int, "version of this table, 1"]
    task: Annotated[str, "name of the task"]
    shards: Annotated[bool, "whether every rank had samples of its own throughout: `--shards`"]
    compressor: Annotated[
        str,
        "name of the compressor; with a policy that changes plans, here and in the next three rows, that of the "
        "plan which leads in the second half of the run: of the compressor that was exchanged most, the plan that "
        "was",
    ]
    compressor_config: Annotated[dict[str, Any], "its configuration"]
    ratio: Annotated[float, "kept fraction; 1 where the compressor has none"]
    collective: Annotated[str, "the collective that ran, or what was asked for where several did"]
    policy: Annotated[str, "name of the policy; `replay` with `--replay`"]
    policy_config: Annotated[dict[str, Any], "its configuration"]
    exchange: Annotated[str, "what was exchanged: `gradients`, or `updates`"]
    updates: Annotated[
        dict[str, Any] | None,
        "settings of the exchange of updates, `every` among them; null for gradients",
    ]
    lr_scale: Annotated[float, "times the learning rate that the task is tuned for: `--lr-scale`"]
    warmup: Annotated[
        int | str,
        "the warm-up at the beginning: so many dense steps, or `ramp:N` for a falling ratio; 0 for none; in exchanges",
    ]
    ranks: Annotated[int, "number of ranks"]
    hosts: Annotated[int, "number of hosts; ranks that share memory are on one"]
    steps: Annotated[int, "number of steps"]
    resumed_at: Annotated[
        int,
        "steps that were made before, by a run whose checkpoint this one went on from: `--checkpoints`; 0 for none",
    ]
    seed: Annotated[int, "of the model, the batches and the schemes"]
    parameters: Annotated[int, "elements of the model"]
    quality: Annotated[dict[str, Any], "what the model reached on held-out data, below"]
    median_step_s: Annotated[float, "a step"]
    phases_s: Annotated[
        dict[str, Any],
        "parts of a step, as in a line of `--metrics`; medians do not add up to `median_step_s`",
    ]
    choosing_s: Annotated[
        float,
        "for choosing plans and learning what they took, mean over steps; mostly a part of `other`",
    ]
    exchange_s: Annotated[
        float | None,
        "one exchange without waiting: `compress` and `decode` of the steps (with a policy that changes plans, or "
        "`lgc`, of the second half), and the rounds measured after the training with all ranks starting together",
    ]
    dense_exchange_s: Annotated[
        float | None,
        "one whole dense exchange, measured after the training with all ranks starting together",
    ]
    dense_collective: Annotated[str | None, "the dense collective that was fastest there"]
    dense_step_s: Annotated[float | None, "estimate of a step with dense exchange, which the verdict uses"]
    slowest_rank: Annotated[
        int | None,
        "the rank with most work of its own, which is `median_step_s` without its `exchange`; null with one rank",
    ]
    slowest_costs_s: Annotated[
        float | None,
        "mean a step, by which it works longer than the middle rank. The verdict names it where that is more than "
        "3 % of a step, and more than three standard errors",
    ]
    gain: Annotated[float | None, "mean of the buckets' gains"]
    delay: Annotated[
        float | None,
        "by which gradients were late in the second half of the run: energy that waits in residuals over the "
        "energy that a step sends, `sum((1 - gain) * energy) / sum(gain * energy)` over its buckets and steps; "
        "null without error feedback, where what is left out does not come later; in steps",
    ]
    by_rank: Annotated[list[dict[str, Any]], "what each rank took, below"]
    ratios: Annotated[dict[str, Any], "kept fraction of the whole model in a step, below"]
    plans: Annotated[list[dict[str, Any]], "what was run, from what was run most, below"]
    layers: Annotated[
        list[dict[str, Any]],
        "what was sent of each parameter, as in a line of `--metrics`; means over ranks and steps, of `gain` over "
        "steps that have one",
    ]
    correlation: Annotated[
        dict[str, Any] | None,
        "what ranks' gradients had in common, below; null without `--correlation N`",
    ]
    sent_bytes: Annotated[int, "payload that a rank handed to the transport"]
    wire_bytes: Annotated[int, "bytes that left a rank"]
    dense_wire_bytes: Annotated[int, "bytes that would have left it in a dense ring"]
    dense_bytes: Annotated[int, "4 x parameters x steps, without those of `resumed_at`"]
    once_bytes: Annotated[
        int,
        "wire bytes of what is sent once: the first parameters, what the network was measured with, and the "
        "weights of a learned code; not in the counts above",
    ]
    verdict: Annotated[
        str,
        "what is printed last: seconds and bytes against dense exchange, the delay, and whether quality was compared",
    ]
