"""The files of deploy/ name commands, flags and folders that there are, and the Slurm script starts
a cluster: with stand-ins for `srun` and `scontrol`, which start real processes on this host."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from jdisagg.client import Client
from jdisagg.errors import JdisaggError
from jdisagg.messages.roles import AdviceReport
from jdisagg.node.cluster_plan import free_ports
from jdisagg.observe.sources import advice_families
from tests import time_scale
from tests.end_to_end.clusters import LLAMA
from tests.end_to_end.process_clusters import PROMPT, oracle, wait_until
from tests.launch.script_ends import ROOT, ends
from tests.programs import CACHE_FLAG

DEPLOY = ROOT / "deploy"


def command_lines(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(command, names of its flags), wherever one is written: in a line, over several lines, or as
    a list of arguments. What a comment explains counts as well."""
    words = re.sub(r"[\[\]\",\\#]|^\s*- ", " ", text, flags=re.M).split()
    for at, word in enumerate(words):
        if word in ("router", "worker", "serve"):
            flags = []
            for following in words[at + 1 :]:
                if not following.startswith("--") and not following.startswith("$"):
                    break
                flags += re.findall(r"^--(\w+)", following)
            if flags:
                yield word, tuple(flags)


@pytest.mark.ci
def test_every_flag_of_every_command_there_is_one_of_its_page() -> None:
    found = {
        path.name: list(command_lines(path.read_text()))
        for path in sorted(DEPLOY.rglob("*"))
        if path.is_file() and path.suffix not in (".json", "")
    }
    found["Dockerfile"] = list(command_lines((DEPLOY / "Dockerfile").read_text()))
    assert {name for name, lines in found.items() if lines} >= {
        *("Dockerfile", "compose.yaml", "kubernetes.yaml", "slurm.sbatch"),
        *("jdisagg-router.service", "jdisagg-worker@.service"),
    }
    pages = {}
    for name in ("router", "worker", "serve"):
        (shown,) = ends(name, ("--help=all",))
        pages[name] = set(re.findall(r"^  --(?:\[no\])?(\w+)", shown.out, flags=re.M))
    for file, lines in found.items():
        for command, flags in lines:
            assert set(flags) <= pages[command], f"{file}: {set(flags) - pages[command]}"


def manifests(text: str) -> list[dict]:
    return [each for each in yaml.safe_load_all(text) if each]


def waits(objects: list[dict]) -> dict[str, set[str]]:
    """Workload -> workloads that must be ready, or have become so, before it can work: a pod that
    connects to a Service needs one of its ready pods, unless the Service publishes addresses of
    pods that are not ready; a router is ready only after workers have registered with it."""
    services = {
        each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"
    }
    workloads = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in objects
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    graph: dict[str, set[str]] = {name: set() for name in workloads}
    for name, template in workloads.items():
        for container in template["spec"]["containers"]:
            for address in re.findall(r"--router=(\S+)", " ".join(container["args"])):
                for host in address.split(","):
                    service = services[host.partition(":")[0].split(".")[-1]]
                    chosen = [
                        other
                        for other, its in workloads.items()
                        if service["selector"].items() <= its["metadata"]["labels"].items()
                    ]
                    assert chosen, f"{name}: {host} selects no pod"
                    if not service.get("publishNotReadyAddresses"):
                        graph[name].update(chosen)
                    for other in chosen:
                        if "grpc" in workloads[other]["spec"]["containers"][0]["readinessProbe"]:
                            graph[other].add(name)
    return graph


def in_a_circle(graph: dict[str, set[str]]) -> set[str]:
    """Workloads that wait, directly or through others, for themselves."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for other in graph[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    return {name for name in graph if name in reached(name)}


def test_no_workload_of_the_kubernetes_manifest_waits_for_itself() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    graph = waits(manifests(text))
    assert graph["router"] == {"prefill", "decode"} and not in_a_circle(graph)
    through_ready_routers = text.replace(
        "router-0.routers:8700,router-1.routers:8700", "jdisagg:8700"
    )
    assert in_a_circle(waits(manifests(through_ready_routers))) == {"router", "prefill", "decode"}


def test_every_workload_has_probes_a_budget_and_as_many_named_routers_as_replicas() -> None:
    objects = manifests((DEPLOY / "kubernetes.yaml").read_text())
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in objects
        if each["kind"] == "StatefulSet"
    }
    assert set(labels) == {"router", "prefill", "decode"}
    budgets = [
        e["spec"]["selector"]["matchLabels"] for e in objects if e["kind"] == "PodDisruptionBudget"
    ]
    for name, own in labels.items():
        assert any(budget.items() <= own.items() for budget in budgets), name
    for each in objects:
        if each["kind"] != "StatefulSet":
            continue
        (container,) = each["spec"]["template"]["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe", "resources"} <= set(container)
        if each["metadata"]["name"] == "router":
            routers = [f"router-{index}.routers:8700" for index in range(each["spec"]["replicas"])]
        else:
            assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == 8
            assert each["spec"]["template"]["spec"]["tolerations"]
    for each in objects:
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] != "router":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            assert f"--router={','.join(routers)}" in container["args"]


def test_the_autoscaler_scales_the_pools_by_a_metric_that_routers_export() -> None:
    scaled = manifests((DEPLOY / "keda.yaml").read_text())
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == {"prefill", "decode"}
    advice = AdviceReport(1, 2, 1, 1, 0.5, 1.5, "", False, "", *[0.0] * 8)
    exported = {
        f'{sample.name}{{role="{sample.labels.get("role")}"}}'
        for family in advice_families(advice)
        for sample in family.samples
    }
    for each in scaled:
        (trigger,) = each["spec"]["triggers"]
        assert re.fullmatch(r"max\((.*)\)", trigger["metadata"]["query"])[1] in exported


def test_a_compose_file_wires_its_workers_to_its_router() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"router", "prefill", "decode"}
    for name in ("prefill", "decode"):
        command = services[name]["command"]
        assert f"--role={name}" in command and "--router=router:8700" in command
        assert f"--host={name}" in command and services[name]["ipc"] == "host"


def test_an_image_is_made_of_what_the_package_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
        for name in line.split()
    }
    assert all((ROOT / name).exists() for name in copied)
    folders = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    folders |= set(project["tool"]["setuptools"]["package-dir"].values())
    assert {folder.split("/")[0] for folder in folders} <= copied
    extras = set(project["project"]["optional-dependencies"])
    assert set(re.findall(r"EXTRAS=(\w+)", text)) <= extras


@pytest.mark.ci
def test_a_slurm_job_serves_and_drains_when_it_is_cancelled(tmp_path: Path) -> None:
    """Both nodes are this host."""
    stubs = {
        "scontrol": 'printf "127.0.0.1\\n127.0.0.1\\n"',
        "srun": "while [[ $1 == --* ]]; do"
        " [[ $1 == --output=* ]] && log=${1#--output=}; shift; done;"
        ' exec "$@" > "$log" 2>&1',
        "jdisagg": f'exec {sys.executable} -m launch "$@"',
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    ports = free_ports("127.0.0.1", 1)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "MODEL": str(LLAMA),
        "PORT": str(ports[0]),
        "PREFILL_LAYOUT": "tp=2",
        "DECODE_LAYOUT": "dp=2",
        "ROUTER_FLAGS": "--drain_seconds=20",
        "WORKER_FLAGS": f"--chunk_tokens=64 --page_size=16 --slots_per_rank=4 --set=warm_up=False"
        f" --drain_seconds=20 {CACHE_FLAG}",
    }
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(
        [str(DEPLOY / "slurm.sbatch")], cwd=ROOT, env=environment, stdout=log, stderr=log
    )
    try:
        with Client(f"127.0.0.1:{ports[0]}") as client:

            def serves() -> bool:
                assert job.poll() is None, (tmp_path / "log").read_text()
                try:
                    return len(client.status()) == 2
                except JdisaggError:
                    return False

            wait_until(serves, "no cluster came up", time_scale.seconds(180.0))
            text, tokens = oracle(6)
            done = client.complete(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
            assert (done.text, list(done.choices[0].token_ids)) == (text, tokens)
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) >= 3
        job.send_signal(signal.SIGTERM)
        assert job.wait(time_scale.seconds(60.0)) == 0
        logs = {path.name: path.read_text() for path in (tmp_path / "jdisagg-7").iterdir()}
        assert set(logs) == {"router.log", "prefill-0.log", "decode-1.log"} and all(logs.values())
        assert not any(child.is_running() for child in children)
    finally:
        for child in psutil.Process(job.pid).children(recursive=True) if job.poll() is None else ():
            child.kill()
        if job.poll() is None:
            job.kill()
        job.wait()
        log.close()
