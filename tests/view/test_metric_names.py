from __future__ import annotations

from rollgraph.view.charts import DESCRIPTIONS, describe_metric
from tests.test_metrics_page import names_on_the_page


def test_every_metric_of_the_metrics_page_is_described() -> None:
    rank_metrics = {name for name in DESCRIPTIONS if name.startswith("speed/ranks/")}
    placeholders = {"failures/environment/<tool>/<exception>", "policy/<name>"}
    assert DESCRIPTIONS.keys() - rank_metrics - placeholders == names_on_the_page()


def test_a_metric_has_the_description_of_its_closest_pattern() -> None:
    assert describe_metric("validation/pass@4") == DESCRIPTIONS["validation/pass@<k>"]
    assert describe_metric("rewards/margins") == DESCRIPTIONS["rewards/margins"]
    assert describe_metric("rewards/exact") == DESCRIPTIONS["rewards/<label>"]
    assert describe_metric("speed/ranks/3/seconds/generate") == DESCRIPTIONS["speed/ranks/<rank>/seconds/<phase>"]
    assert describe_metric("something/else") == ""
