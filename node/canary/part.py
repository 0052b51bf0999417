"""Checks the share of received prompts that `transfer.canary_share` names."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tandem.engine.core import Engine
from tandem.node.canary.canary import CanaryChecks, CanaryFindings
from tandem.node.status import copied
from tandem.node.wings import PartContext, ServicePart


def make(context: PartContext) -> ServicePart | None:
    config, engine = context.config, context.engine
    if not isinstance(engine, Engine) or config.transfer is None:
        return None
    if not config.role.writes_answers or not config.transfer.canary_share:
        return None
    engine.idle_check = checks = CanaryChecks(
        engine.scheduler,
        engine.runner,
        config.transfer.canary_share,
        exact=config.engine.model.exact == "require",
    )
    return CanaryPart(checks.findings)


class CanaryPart(ServicePart):
    def __init__(self, findings: CanaryFindings) -> None:
        self._findings = findings

    def count(self, counters: dict[str, Any]) -> None:
        counters["kv_checks"] = self._findings.checked
        counters["wrong_kv"] = copied(Counter(counters["wrong_kv"]) + self._findings.wrong)
