"""BR-13: the first use inside a loop that XLA records as a CUDA graph."""

from __future__ import annotations

import json
import re
from pathlib import Path

from harness import DRY, Findings, output_of, run_apart

KINDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"
SMALLEST = "--xla_gpu_graph_min_graph_size=1"
FLAGS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "each step a graph": f"--xla_gpu_enable_command_buffer={KINDS} {SMALLEST}",
    "the loop a graph": f"--xla_gpu_enable_command_buffer={KINDS},WHILE {SMALLEST}",
}
CALLS = ("kCustomCall", "kDynamicSlice")  # the second: a call with the slicing of its operands fused in
LINE = re.compile(r"^(\s*)(?:\d+:\s*)?(k\w+)")


def test_first_use_inside_a_captured_loop(route, tmp_path, record_property):
    """A fresh process each, graphs forced on or off: the same bits, and in graphs where they are on."""
    dumps = {name: tmp_path / str(n) for n, name in enumerate(FLAGS)}
    processes = {
        name: run_apart("capture", route, flags=f"{flags} --xla_dump_to={dumps[name]} --xla_dump_hlo_as_text")
        for name, flags in FLAGS.items()
    }
    outputs = {name: output_of(process, 300 if DRY else 120) for name, process in processes.items()}
    digests = {name: json.loads(out.split("digests:")[1]) for name, out in outputs.items()}
    with Findings(record_property) as found:
        for name, both in digests.items():
            found.expect(both["scan"] == digests["off"]["scan"], f"{name}: other bits than without graphs")
            found.expect(both["scan"] == both["loop"], f"{name}: other bits than plain calls give")
            if not DRY:
                inside, alone = calls_in_graphs(dumps[name])
                record_property(f"{name}: calls in graphs, and not", f"{inside}, {alone}")
                wrong = inside if name == "off" else alone
                found.expect(not wrong, f"{name}: {inside} calls in graphs and {alone} outside")


def calls_in_graphs(dump: Path) -> tuple[int, int]:
    """How many custom calls of the scan stand inside a command buffer, and how many outside, by XLA's own
    list of what the program runs. That list is nested by indentation.
    """
    files = sorted(dump.glob("*jit_captured*thunk_sequence_after_thunk_passes*.txt"))
    files = files or sorted(dump.glob("*jit_captured*thunk_sequence*.txt"))
    names = sorted(path.name for path in dump.glob("*"))
    assert files, f"XLA wrote no list of thunks; it wrote {names}"
    inside = alone = 0
    above: list[tuple[int, str]] = []
    for line in files[-1].read_text().splitlines():
        match = LINE.match(line)
        if not match:
            continue
        indent, kind = len(match[1]), match[2]
        while above and above[-1][0] >= indent:
            above.pop()
        if kind.startswith(CALLS):
            if any(parent == "kCommandBuffer" for _, parent in above):
                inside += 1
            else:
                alone += 1
        above.append((indent, kind))
    assert inside + alone, f"no custom call in {files[-1].name}:\n{files[-1].read_text()[:4000]}"
    return inside, alone
