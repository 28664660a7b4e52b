"""JSON form of coverage, frontiers and policies, for stored forms and snapshots."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fleetpulse.core.policy import Dated, Policies, from_normalised
from fleetpulse.core.presence.coverage import Coverage, ShardProgress
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.rows import BRIDGE


def context_to_plain(shards: Shards, policies: Policies) -> dict[str, Any]:
    """Return coverage and frontier of every shard, and policies, as JSON values."""
    plain = {
        **_listening_to_plain(shards.listenings[0]),
        "policies": [_dated_to_plain(dated) for dated in policies.dated],
    }
    named = zip(shards.sites, shards.listenings[1:], strict=True)
    others = [{"sites": sorted(sites), **_listening_to_plain(listening)} for sites, listening in named]
    return {**plain, "shards": others} if others else plain


def context_from_plain(known: Mapping[str, Any]) -> tuple[Shards, Policies]:
    """Inverse of `context_to_plain`; further entries are ignored."""
    others = known.get("shards", ())
    listenings = tuple(_listening_from_plain(one) for one in (known, *others))
    shards = Shards(listenings, tuple(frozenset(one["sites"]) for one in others))
    return shards, Policies(tuple(_dated_from_plain(plain) for plain in known["policies"]))


def _listening_to_plain(listening: ShardProgress) -> dict[str, Any]:
    coverage = listening.coverage
    return {
        "start_ms": coverage.start_ms,
        "base_ms": coverage.base_ms,
        "gaps": coverage.gaps,
        "deaf": coverage.deaf,
        "until_ms": coverage.until_ms,
        "newest_ms": listening.newest_ms,
        "frontier_ms": listening.frontier_ms,
    }


def _listening_from_plain(known: Mapping[str, Any]) -> ShardProgress:
    gaps = tuple((gap[0], gap[1]) for gap in known["gaps"])
    alone = [BRIDGE] if gaps and gaps[-1][1] is None else []
    # stored forms from before there were several bridges do not name the bridge of a gap
    deaf, until_ms = tuple(known.get("deaf", alone)), known.get("until_ms")
    coverage = Coverage(known["start_ms"], known["base_ms"], gaps, deaf, until_ms)
    return ShardProgress(coverage, known["newest_ms"], known["frontier_ms"])


def _dated_to_plain(dated: Dated) -> dict[str, Any]:
    return {
        "effective_from_ms": dated.effective_from_ms,
        "received_at_ms": dated.received_at_ms,
        "version": dated.version,
        "policy": dated.policy.normalised(),
    }


def _dated_from_plain(plain: dict[str, Any]) -> Dated:
    return replace(Dated(**plain), policy=from_normalised(plain["policy"]))
