"""compute-sanitizer's tools over the GPU's tests, for gpu_record.py."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
from typing import Any

from proofs.part import FEW_THREADS, ROOT, Part, brief

# Which tests each tool runs. One launch under a tool takes up to a hundred times as long, and to
# instrument a kernel seconds: racecheck, the slowest, has parts of about 150 s.
OPERATORS = "*GpuOperators*_values"
OF_IMAGES = (
    *("conv[!2]*", "conv2d", "conv2d_[!c]*", "conv2d_channels_last"),
    *("*pool*", "batch_norm*"),
)
OF_SHARED_MEMORY = (
    *("matmul*", "batched_matmul", "*softmax*", "sum", "mean", "reducesumaxiszero", "transpose"),
    *("layer_norm*", "max", "argmax", "prod", "cumsum"),
    *("logsumexp", "scatter*", "embedding*", "pointwise*", "*update*", "shuffled*", "*head*"),
    *("sort", "argsort", "topk*", "cumprod", "recurrence", "*attention*"),
)
IMAGES = tuple(f"*GpuOperators.test_{name}_values" for name in OF_IMAGES)
SHARED_MEMORY = (
    *(f"*GpuOperators.test_{name}_values" for name in OF_SHARED_MEMORY),
    "*GpuUpdates.test_groups_of_all_shapes*",
)
OF_TMA = (  # their results are stored by it
    "*GpuOperators.test_attention*_narrow",
    "*GpuOperators.test_conv2d_channels_last_statistics_values",
)
SUBSET = (*IMAGES, *SHARED_MEMORY, *OF_TMA)
UPDATES = ("*GpuUpdates.test_*_of_all_shapes*", "*GpuKernel.test_arrays_at_any_address*")
BYTES = (
    *("*test_uint8_kernels.*sizes_by_the_rule*", "*test_uint8_kernels.*test_groups*"),
    *("*test_uint8_kernels.*any_address*", "*test_uint8_kernels.*rows_are_numpys*"),
)
NORMS = "*GpuNorms.test_[vns]*"  # of all forms and shapes
EPILOGUES = "*test_gemm_epilogue.GpuValues"
LONG_HEADS = {"over rows": "heads_over*", "of two layers": "heads_of_two*"}
OTHER_EPILOGUES = ("[!h]*", "heads_of_one*")
# Of all rungs: shapes of whole and partial tiles, arrays at any address, variants, fused epilogues.
VARIANTS = {
    **{rung: f"*OfTheGpu.test_every_variant_of_{rung}" for rung in ("warp", "tensor")},
    **{x: f"*NarrowGemm.test_every_variant_of_{x}" for x in ("bfloat16", "float16")},
}
FILLED_FIRST = (
    *(f"*OfTheGpu.test_{name}" for name in ("arrays_need*", "every_variant", "epilogues")),
    "*NarrowGemm.test_batches*",
)
OTHER_RUNGS = (*FILLED_FIRST, "*NarrowGemm.test_epilogues")
LADDER = (*OTHER_RUNGS, *VARIANTS.values())
# Every rung of convolution in every direction, at odd shapes.
CONVOLUTIONS = ("*test_conv_ladder.TestLadder.test_[be]*",)
FLASH = ("*FlashAttention.test_every_shape*",)
# The kernels of flash attention whose blocks take one tile, and several.
RINGS = ("*FlashAttention.test_the_same_bits*", "*FlashAttention.test_more_heads*")
# Of networks in 16 bits: convolutions, norms with the residual stream, losses, sums of columns.
NARROW = (
    *("*test_channels_last.Convolutions*", "*test_fused_layer_norm.GpuNorms.test_[van]*"),
    *("*test_narrow_cross_entropy*close_to_float64*", "*test_column_sums*exact*"),
)
TOOLS = {
    "memcheck": (
        (
            OPERATORS,
            "*GpuKernels*",
            f"{EPILOGUES}*",
            *UPDATES,
            *BYTES,
            NORMS,
            *LADDER,
            *CONVOLUTIONS,
            *FLASH,
            *NARROW,
        ),
        "separate",
    ),
    "racecheck, operators": (SHARED_MEMORY, "shared"),
    "racecheck, operators of images": ((*IMAGES, *OF_TMA), "shared"),
    "racecheck, bytes": (BYTES, "shared"),
    "racecheck, batch norms": (("*test_fused_batch_norm.GpuNorms.test_[vns]*",), "shared"),
    "racecheck, epilogues": (tuple(f"{EPILOGUES}.test_{x}" for x in OTHER_EPILOGUES), "shared"),
    **{
        f"racecheck, heads {which}": ((f"{EPILOGUES}.test_{name}",), "shared")
        for which, name in LONG_HEADS.items()
    },
    "racecheck, ladders": (OTHER_RUNGS, "shared"),
    **{f"racecheck, variants of {x}": ((test,), "shared") for x, test in VARIANTS.items()},
    "racecheck, convolutions": (CONVOLUTIONS, "shared"),
    "racecheck, 16 bits": ((*NARROW, *RINGS), "shared"),
    # It does not see what TMA stores, and so has no operators that do, and of products those into
    # arrays that tests fill first.
    "initcheck": (
        (*IMAGES, *SHARED_MEMORY, *BYTES, NORMS, *FILLED_FIRST, *VARIANTS.values()),
        "shared",
    ),
    "synccheck": ((*SUBSET, *BYTES, NORMS, *LADDER, *FLASH, *RINGS, *NARROW), "shared"),
}


def sanitizers(part: Part) -> None:
    """compute-sanitizer's tools, side by side: each spends most of its time on the host."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(program, os.X_OK):
        part.result.update(ok=True, tools={tool: {"outcome": "not run: missing"} for tool in TOOLS})
        return
    results: dict[str, Any] = {tool: {"outcome": "not run: no time was left"} for tool in TOOLS}
    part.result["tools"] = results
    gpus = count_gpus()
    with concurrent.futures.ThreadPoolExecutor(len(TOOLS)) as pool:
        jobs = {
            pool.submit(sanitize, part, program, tool, k % gpus): tool
            for k, tool in enumerate(TOOLS)
        }
        for job in concurrent.futures.as_completed(jobs):
            results[jobs[job]] = job.result()
            part.save()
    outcomes = [result["outcome"] for result in results.values()]
    part.result["ok"] = all(text == "clean" or text.startswith("not run") for text in outcomes)


def count_gpus() -> int:
    """How many GPUs the tools share, at least one."""
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return max(1, len(re.findall(r"^GPU \d", done.stdout, re.M)))


def sanitize(part: Part, program: str, tool: str, gpu: int) -> dict[str, Any]:
    """One tool over its tests, with the own matrix product, on one GPU."""
    patterns, arena = TOOLS[tool]
    command = [
        program,
        "--tool",
        tool.partition(",")[0],
        "--error-exitcode",
        "99",
        "--print-limit",
        "10",
    ]
    command += [
        sys.executable,
        "-m",
        "unittest",
        "-v",
        "ops.test_operators",
        "native.test_gpu_op",
        "native.test_gemm_ladder",
        "native.test_narrow_gemm",
        "native.test_flash_attention",
        "conv.test_conv_ladder",
        "fusion.test_gemm_epilogue",
        "fusion.test_weight_update_gpu",
        "fusion.test_uint8_kernels",
        "fusion.norm.test_fused_batch_norm",
        "fusion.conv.test_channels_last",
        "fusion.norm.test_fused_layer_norm",
        "fusion.test_narrow_cross_entropy",
        "ops.test_column_sums",
    ]
    command += [argument for pattern in patterns for argument in ("-k", pattern)]
    env = {"DLSYS_DEBUG_ARENA": arena, "DLSYS_BLAS": "own", "DLSYS_REQUIRE_GPU": "1", **FEW_THREADS}
    env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    done = part.run(command, cwd=ROOT / "tests", env=env)
    output = done["output"]
    ran, verdict = re.search(r"^Ran (\d+) tests?", output, re.M), verdict_of(tool, done)
    return {
        **brief(done),
        "outcome": verdict,
        "tests": int(ran[1]) if ran else 0,
        "tests_passed_before_the_end": len(re.findall(r"\.\.\. ok$", output, re.M)),
    }


def verdict_of(tool: str, done: dict[str, Any]) -> str:
    """clean, or what was found, or why the tool did not run."""
    output = done["output"]
    refused = re.search(r"^.*(?:[Dd]evice not supported|not supported on this).*$", output, re.M)
    if refused:
        return f"not run: {refused[0].strip('= ')}"
    summary = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)$", output, re.M)
    if done["status"] is None:
        wanted = r"=========\s((?:Invalid|Uninitialized|Race|Error|Warning|Barrier).*)$"
        found = re.findall(wanted, output, re.M)
        return f"found: {found[0]}" if found else "unfinished: nothing found within the time limit"
    if summary and not re.match(r"0 (errors|hazards)", summary[1]):
        return f"found: {summary[1]}"
    if done["status"] or not summary:
        return f"failed: status {done['status']}"
    return "clean"
