from __future__ import annotations

from kvmesh.core.adapters import AdapterReport, AdapterWish, AdapterWishes
from kvmesh.rpc.convert_adapters import (
    adapter_report_from_proto,
    adapter_report_to_proto,
    adapter_wishes_from_proto,
    adapter_wishes_to_proto,
)


def test_wishes_and_reports_come_back() -> None:
    wishes = AdapterWishes(7, (AdapterWish("sql", "/a", 6), AdapterWish("py", "/b", 7)))
    assert adapter_wishes_from_proto(adapter_wishes_to_proto(wishes)) == wishes
    report = AdapterReport(7, {"py": "no place"})
    assert adapter_report_from_proto(adapter_report_to_proto(report)) == report
