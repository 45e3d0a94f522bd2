"""Prometheus and Grafana: the metrics are there, their number is bounded, and the dashboard asks for no others."""

import json
import re
import urllib.request

import pytest
from online_jobs import Job
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_online_detect import slow
from test_watch_watcher import run, stuck

from trimtab.watch.grafana import dashboard
from trimtab.watch.metrics import Endpoint, WatchCollector
from trimtab.watch.watcher import Watcher


def scraped(watcher):
    collector, registry = WatchCollector(), CollectorRegistry()
    registry.register(collector)
    collector.show(watcher, 100.0, 0)
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def values(families):
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.fixture(scope="module")
def slowed():
    watcher = Watcher()
    run(watcher, Job(noise=0.01, disturb=slow(3, 1.3, first=40)), 50)
    return watcher


def test_the_metrics_say_what_the_watcher_knows(slowed):
    found = values(scraped(slowed))
    assert found["trimtab_ranks",] == 8
    assert found["trimtab_step",] == 49
    assert found["trimtab_alarms", "slow_rank"] == 1
    assert found["trimtab_alarms_raised_total", "slow_rank"] == 1
    assert found["trimtab_rank_alarmed", "node-0", "3", "0"] == 1
    assert found["trimtab_rank_alarmed", "node-0", "2", "0"] == 0
    assert found["trimtab_rank_excess", "node-0", "3", "0"] == pytest.approx(0.26, abs=0.06)
    assert found["trimtab_rank_seconds", "node-0", "3", "0", "compute"] == pytest.approx(0.26, abs=0.06)
    assert found["trimtab_lost_seconds_per_step", "slow_rank"] == pytest.approx(0.06, abs=0.03)


def test_of_many_ranks_there_are_aggregates_only():
    watcher = Watcher()
    run(watcher, Job(ranks=300), 10)
    assert sum(len(family.samples) for family in scraped(watcher)) < 40


def test_before_anything_is_known_there_is_something_to_scrape():
    assert values(scraped(Watcher()))["trimtab_hangs_total",] == 0


def test_a_hang_is_counted():
    watcher = Watcher(patience=5.0)
    watcher.take(stuck(), 0.0)
    watcher.take([], 10.0)
    found = values(scraped(watcher))
    assert (found["trimtab_hanging",], found["trimtab_hangs_total",]) == (1, 1)


def test_the_endpoint_serves_and_leaves_its_port(slowed):
    endpoint = Endpoint(("127.0.0.1", 0))
    host, port = endpoint.address
    try:
        endpoint.collector.show(slowed, 100.0, 0)
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
            assert b'trimtab_alarms{kind="slow_rank"} 1.0' in answer.read()
        with pytest.raises(ValueError, match=f"--prometheus {host}:{port}: cannot listen there"):
            Endpoint((host, port))
    finally:
        endpoint.close()
    Endpoint((host, port)).close()


def test_the_dashboard_asks_for_metrics_that_exist(slowed):
    known = {sample.name for family in scraped(slowed) for sample in family.samples}
    made = json.loads(json.dumps(dashboard()))
    asked = {
        name
        for panel in made["panels"]
        for target in panel["targets"]
        for name in re.findall(r"trimtab_\w+", target["expr"])
    }
    assert asked <= known
    assert len(asked) >= 10


def test_the_panels_do_not_overlap():
    panels = dashboard()["panels"]
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
