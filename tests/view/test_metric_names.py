from __future__ import annotations

from rollgraph.view.charts import DESCRIPTIONS, describe_metric
from tests.test_metrics_page import names_on_the_page


def test_every_metric_of_the_page_has_a_sentence_and_no_other() -> None:
    by_several_ranks = {name for name in DESCRIPTIONS if name.startswith("speed/ranks/")}
    of_tools_and_algorithms = {"failures/environment/<tool>/<exception>", "policy/<name>"}
    assert DESCRIPTIONS.keys() - by_several_ranks - of_tools_and_algorithms == names_on_the_page()


def test_the_nearest_name_is_described() -> None:
    assert describe_metric("validation/pass@4") == DESCRIPTIONS["validation/pass@<k>"]
    assert describe_metric("rewards/margins") == DESCRIPTIONS["rewards/margins"]
    assert describe_metric("rewards/exact") == DESCRIPTIONS["rewards/<label>"]
    assert describe_metric("speed/ranks/3/seconds/generate") == DESCRIPTIONS["speed/ranks/<rank>/seconds/<phase>"]
    assert describe_metric("something/else") == ""
