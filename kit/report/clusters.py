"""The best plan of one job on each of several clusters, with days and money."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kit.errors import SpecError
from kit.planner.fallbacks import without_loss
from kit.planner.make_plan import NO_TIME, plan_that_ends
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import can_fit
from kit.planner.sweep import Outcome, Variant, sweep
from kit.report.view import of_a_billion
from kit.specs.catalog import parse_cluster
from kit.specs.cluster import LARGEST_PRICE, ClusterSpec
from kit.specs.layout import Layout, Pins, describe
from kit.units import human_count

_WIDTH = 80
_NAME = 27


@dataclass(frozen=True, kw_only=True)
class ClusterAnswer:
    """One cluster of a comparison. Where nothing fits, ``why_none`` says why, and the rest is null."""

    cluster: str
    """As it was asked for."""
    num_gpus: int
    price_per_node_hour_usd: float | None
    layout: Layout | None = None
    peak_gib: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    days: float | None = None
    """For the job's tokens, or a billion where nobody says how many, with checkpoints and failures; null of epochs,
    whose rows a run counts."""
    cost_usd: float | None = None
    """For the same days; null without a price or days."""
    tokens: int | None = None
    """Number of tokens whose days and cost these are; null of epochs."""
    why_none: str | None = None


def clusters_named(names: Sequence[str], prices: Sequence[str] = ()) -> dict[str, ClusterSpec]:
    """Name → cluster, each as ``--gpus`` takes it, with its price replaced by ``38.5`` or ``NAME=38.5``.

    A price is in USD for a node and hour. Raises ``SpecError``.
    """
    found = {name: parse_cluster(name) for name in names}
    if len(found) < len(names):
        raise SpecError(f"--clusters {','.join(names)}: a cluster is named twice; leave one of them out")
    for text in prices:
        name, equals, number = text.rpartition("=")
        if equals and name not in found:
            raise SpecError(f"--price {text}: {name!r} is not among the clusters {', '.join(found)}")
        try:
            price = float(number)
        except ValueError:
            price = 0.0
        if not 0 < price <= LARGEST_PRICE:
            raise SpecError(f"--price {text}: {number!r} is no price; write USD for a node and hour, such as 38.5")
        for each in [name] if equals else list(found):
            found[each] = dataclasses.replace(found[each], price_per_node_hour_usd=price, price_date=None)
    return found


def compare_clusters(asked: Request, clusters: Mapping[str, ClusterSpec]) -> tuple[ClusterAnswer, ...]:
    """The best plan without loss of accuracy on each cluster, in the order given; ``asked.cluster`` is not used."""
    lossless = dataclasses.replace(asked, pins=without_loss(asked.pins), job=of_a_billion(asked.job))
    variants = (Variant(name, dataclasses.replace(lossless, cluster=cluster)) for name, cluster in clusters.items())
    return tuple(_answer(outcome, asked.pins) for outcome in sweep(variants, lambda each: plan_that_ends(each.request)))


def _answer(outcome: Outcome[Variant, Plan], pins: Pins) -> ClusterAnswer:
    """A row of the comparison. ``pins``: the user's own, which may allow a loss of accuracy."""
    request, plan = outcome.variant.request, outcome.found
    cluster = request.cluster
    row = ClusterAnswer(
        cluster=outcome.variant.label,
        num_gpus=cluster.num_gpus,
        price_per_node_hour_usd=cluster.price_per_node_hour_usd,
    )
    if plan is None:
        lossy = outcome.why_none != NO_TIME and can_fit(dataclasses.replace(request, pins=pins))
        more = "; with loss of accuracy it does (kit plan), which is not compared" if lossy else ""
        return dataclasses.replace(row, why_none=outcome.why_none.splitlines()[0] + more)
    predicted = plan.predicted
    return dataclasses.replace(
        row,
        layout=plan.layout,
        peak_gib=predicted.peak_gib,
        tokens_per_s=predicted.tokens_per_s,
        mfu=predicted.mfu,
        days=predicted.total_days,
        cost_usd=predicted.total_cost_usd,
        tokens=request.job.total_tokens,
    )


def cluster_table(answers: Sequence[ClusterAnswer]) -> str:
    """A table of at most 80 columns: two lines a cluster, then the fastest and the cheapest."""
    head = f"{'cluster':{_NAME}}{'GPUs':>6}{'$/node h':>9}{'GiB':>6}{'MFU':>7}{'days':>10}{'USD':>15}"
    best = (("fastest", _least(answers, "days")), ("cheapest", _least(answers, "cost_usd")))
    lines = [
        head,
        *(line for each in answers for line in _lines(each)),
        *(f"{what}: {found.cluster}" for what, found in best if found and len(answers) > 1),
        *(f"days and USD of {human_count(tokens)} tokens" for tokens in {each.tokens for each in answers} if tokens),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _lines(each: ClusterAnswer) -> Iterator[str]:
    price = "-" if each.price_per_node_hour_usd is None else f"{each.price_per_node_hour_usd:,.2f}"
    long = len(each.cluster) >= _NAME
    if long:
        yield each.cluster
    start = f"{'' if long else each.cluster:{_NAME}}{each.num_gpus:>6,}{price:>9}"
    if each.layout is None:
        yield start
        yield from textwrap.wrap(f"nothing fits: {each.why_none}", _WIDTH, initial_indent="  ", subsequent_indent="  ")
        return
    days = "-" if each.days is None else f"{each.days:,.1f}"
    no_cost = "-" if each.days is None else "no price"
    cost = no_cost if each.cost_usd is None else f"{each.cost_usd:,.0f}"
    yield f"{start}{each.peak_gib:>6.0f}{each.mfu:>7.1%}{days:>10}{cost:>15}"
    yield from textwrap.wrap(describe(each.layout), _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _least(answers: Sequence[ClusterAnswer], field: str) -> ClusterAnswer | None:
    known = [each for each in answers if getattr(each, field) is not None]
    return min(known, key=lambda each: getattr(each, field), default=None)
