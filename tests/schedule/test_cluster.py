"""Descriptions of clusters: presets, files, and what is refused."""

import dataclasses
import math

import pytest
import torch

import fparallel as fp
from fparallel.errors import ClusterError
from fparallel.schedule.cluster import PRESETS, Link


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_a_file(tmp_path, name):
    cluster = fp.Cluster.preset(name)
    cluster.save(tmp_path / "cluster.json")
    assert fp.Cluster.load(tmp_path / "cluster.json") == cluster
    assert cluster.name == name and cluster.rate(torch.float16) >= cluster.rate(torch.float32)


def test_infinite_rates_survive_a_file(tmp_path):
    cluster = fp.Cluster.preset("h100", intra=Link(0.0, math.inf))
    cluster.save(tmp_path / "cluster.json")
    assert fp.Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_preset_with_changes():
    cluster = fp.Cluster.preset("h100", ranks_per_node=4)
    assert cluster == dataclasses.replace(PRESETS["h100"], ranks_per_node=4)


def test_a_dtype_that_is_not_listed_runs_at_the_lowest_rate():
    assert fp.Cluster.preset("v100").rate(torch.bfloat16) == 7.8e12


def test_an_unknown_preset_is_refused():
    with pytest.raises(ClusterError, match="no preset 'h10'") as error:
        fp.Cluster.preset("h10")
    assert "did you mean 'h100'?" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"flops": {"float32": -1.0}}, r"flops\['float32'\]"),
        ({"inter": Link(0.0, math.nan)}, "inter.bandwidth"),
        ({"intra": Link(-1.0, 1.0)}, "intra.latency"),
        ({"op_overhead": math.inf}, "op_overhead"),
        ({"flops": {}}, "computes in no dtype"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(changes, named):
    with pytest.raises(ClusterError, match=named):
        fp.Cluster.preset("h100", **changes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"intra": 3}', '{"name": "x"', None])
def test_a_file_that_is_no_cluster_is_refused(tmp_path, text):
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterError, match=r"cannot read a cluster from .*cluster\.json"):
        fp.Cluster.load(path)
