"""Numbers that pages quote from the code are those of the code.

QUOTES has, for each page, sentences with the constants that they quote. A sentence that was reworded is reworded here,
too, and one that is gone is removed.
"""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import pytest

from headrace.actors.engines.config import CPU_BATCH, GPU_BATCH, GPU_SHARE, SHARED_GPU_SHARE
from headrace.actors.engines.vllm.options import CPU_BYTES, CPU_SEQUENCES
from headrace.actors.engines.vllm.start import MAX_BYTES as MAX_LOG_BYTES
from headrace.actors.environments.tool_use import ToolUse
from headrace.actors.process.user_function_timeouts import MAX_HUNG
from headrace.actors.rewards.rubric import NUM_PROCESSES
from headrace.actors.rollout.prompts import BLOCK
from headrace.actors.rollout.results import MAX_ERRORS
from headrace.actors.train.step_rows import GROWTH, MOST_AT_ONCE
from headrace.actors.weight_sync.cache import NUM_VERSIONS
from headrace.codecs.block_header import CHECKSUM_ROWS
from headrace.codecs.tokens.routes import MOST_BYTE_EXPERTS
from headrace.codecs.weights.parameter_digests import NUM_SAMPLED
from headrace.dataplane.client.block_io import BLOCK_ROWS, LEAST_BYTES, MOST_BYTES
from headrace.dataplane.client.put_credit import MAX_BYTES, RECENT_PUTS, SLACK_PART
from headrace.dataplane.config import DataPlaneConfig, StoreKind
from headrace.dataplane.directory.block_table import SPARE_PART
from headrace.dataplane.rpc.links import GRACE_S
from headrace.dataplane.security.authenticated_listener import HANDSHAKE_TIMEOUT_S, MAX_STRANGERS, MOST_STRANGERS
from headrace.dataplane.security.handshake import HELLO_BYTES, KEY_BYTES
from headrace.dataplane.stores.shared_memory import SPARE_BYTES
from headrace.dataplane.stores.shared_memory import SPARE_PART as SHM_SPARE_PART
from headrace.dataplane.stores.shm_folder import PIECE_BYTES
from headrace.dataplane.traffic import MIN_CALLS, MIN_ERRORS, MIN_SPREAD, STEPS_PER_OCTAVE
from headrace.tests.drills.chaos.drill import WHOLE_MINUTES
from headrace.tests.drills.chaos.faults import LASTS_S
from headrace.tests.drills.chaos.memory import MOST_GROWTH, SETTLED_S, SLACK_BYTES
from headrace.tests.drills.chaos.surgeon import RECOVERY_S, SLOW_S
from headrace.trainers.cluster.gpu_bundles import GPU_SHARE as ACTOR_GPU_SHARE
from headrace.trainers.cluster.transport_choice import POOL_BUCKET_MIB
from headrace.trainers.config.config import RunConfig
from headrace.trainers.config.staleness import Mode
from headrace.trainers.config.store_demand import LOGPROB_BYTES, ROLLOUT_TOKEN_BYTES
from headrace.trainers.grpo.gpu_turns import FALL_S
from headrace.trainers.grpo.train_workers import STALL_S
from headrace.trainers.grpo.training_modes import MOST_SKIPPED
from headrace.trainers.observe.pages.report import RELOAD_S
from headrace.trainers.pool.state.pool import PoolBounds
from headrace.trainers.run.checks.prompts import READ_PROMPTS
from headrace.trainers.run.checks.trust_probe import SOUND_IN_HALF, SOUND_RATIO, TOKENS
from headrace.trainers.supervision.watchdog import GRACE_S as WATCHDOG_GRACE_S
from headrace.trainers.supervision.watchdog import MARGIN_S

DOCS = Path(__file__).parent.parent.parent / "docs"
PARTS = {4: "quarter", 8: "eighth"}
WORDS = {2: "two", 4: "four"}

TOKEN_BYTES = ROLLOUT_TOKEN_BYTES + 3 * LOGPROB_BYTES
"""Bytes of a token with the log-probs of both sides and the advantage, which are as long as a log-prob."""
PLANE, RUN, BOUNDS = DataPlaneConfig(), RunConfig(), PoolBounds()
TOOL_S = inspect.signature(ToolUse).parameters["timeout_s"].default
READS = [GROWTH**power for power in range(3)]

QUOTES: dict[str, list[str]] = {
    "reference/security.md": [
        f"a random key of {KEY_BYTES} bytes",
        f"Above {MAX_STRANGERS} unproven connections per service",
        f"never more than {MOST_STRANGERS}.",
        f"at most {HANDSHAKE_TIMEOUT_S:g} seconds and costs a descriptor and {HELLO_BYTES} bytes",
    ],
    "reference/config.md": [
        f"one checksum per {CHECKSUM_ROWS} rows of a field",
        f"Unset: {BLOCK_ROWS} rows, but more where a block would be smaller than {LEAST_BYTES >> 10} "
        f"KiB, and fewer where a field of a block would be larger than {MOST_BYTES >> 20} MiB",
    ],
    "reference/metrics.md": [
        f"({STEPS_PER_OCTAVE} buckets per octave",
        f"fewer than {MIN_CALLS} calls that moved bytes",
        f"of one size (to {MIN_SPREAD:.1%}".replace("%", " %"),
        f"less than {MIN_ERRORS:g} standard errors",
        f"After {MOST_SKIPPED} such steps in a row the run ends",
        f"A run whose first step is above {SOUND_RATIO} ({SOUND_IN_HALF} in bfloat16)",
    ],
    "troubleshooting.md": [
        f"makes up to {SOUND_IN_HALF} in bfloat16, and {SOUND_RATIO} in float32",
    ],
    "reference/command-line.md": [
        f"a train backend on {TOKENS} tokens of a model",
        f"differ by more than a factor of {SOUND_RATIO} ({SOUND_IN_HALF} in bfloat16)",
        f"(of the first {READ_PROMPTS:,} of a source)",
    ],
    "data-plane/index.md": [
        f"would be over {MAX_BYTES >> 20} MiB",
        f"largest of the writer's last {RECENT_PUTS} puts, and up to a {PARTS[SLACK_PART]} larger",
        f"from the last {PARTS[SPARE_PART]} of the capacity",
        f"together {ROLLOUT_TOKEN_BYTES} bytes per token of a rollout",
        f"capacity by an {PARTS[SHM_SPARE_PART]} and {SPARE_BYTES >> 20} MiB, in whole pieces of "
        f"{PIECE_BYTES >> 20} MiB",
        f"for `timeout_s` + {GRACE_S:g} s",
        f"capacity_mib: {PLANE.store.capacity_mib}}} #",
        f"timeout_s: {PLANE.timeout_s:g} #",
        f"lease_s: {PLANE.lease_s:g} #",
        f"reserve_s: {PLANE.reserve_s:g} #",
        f"(null: {BLOCK_ROWS}, fewer if a field has {MOST_BYTES >> 20} MiB, "
        f"more if a block has under {LEAST_BYTES >> 10} KiB)",
    ],
    "internals/weights.md": [
        f"or of {NUM_SAMPLED} that differ by version",
        f"keeps {WORDS[NUM_VERSIONS]} versions in the trainer's host memory",
    ],
    "internals/router-replay.md": [
        f"models of more than {MOST_BYTE_EXPERTS} experts",
        f"takes {TOKEN_BYTES} bytes per token",
        f"runs {TOKENS} tokens through",
        f"of at most {SOUND_RATIO} on average, or {SOUND_IN_HALF} if one of them",
        f"is above {SOUND_RATIO} in that step ({SOUND_IN_HALF} in bfloat16)",
    ],
    "internals/train-step.md": [
        f"read {', '.join(map(str, READS))}, then {MOST_AT_ONCE} at a time",
    ],
    "rollouts/engine.md": [
        f"| {CPU_BYTES >> 20} MiB, or what {CPU_SEQUENCES} such sequences need |",
        f"| {GPU_SHARE}; {SHARED_GPU_SHARE} on GPUs",
        f"| {GPU_BATCH} | {CPU_BATCH} |",
        f"at most {MAX_LOG_BYTES >> 20} MiB per engine",
    ],
    "rollouts/environment.md": [f"when {MAX_HUNG} hang in one rollout actor"],
    "rollouts/tools.md": [f"after {TOOL_S:g} s is abandoned", f"when {MAX_HUNG} calls hang in one rollout actor"],
    "training/memory.md": [f"its memory must fall within {FALL_S:g} s"],
    "reliability/resume.md": [
        f"{STALL_S / 60:g} minutes",
        f"`resources.stage_timeout_s` and {MARGIN_S:g} s",
        f"another {WATCHDOG_GRACE_S:g} s",
        f"checkpoint_minutes: {RUN.checkpoint_minutes:g} #",
        f"checkpoint_every: 50 # steps; {RUN.checkpoint_every}, the default",
        f"keep_checkpoints: {RUN.keep_checkpoints} #",
    ],
    "reliability/what-a-run-survives.md": [
        f"A drill of {WHOLE_MINUTES:g} minutes or more also exits",
        f"SIGCONT after {LASTS_S[0]:g} to {LASTS_S[1]:g} s",
        f"takes {SLOW_S:g} s longer",
        f"finishes no step for {RECOVERY_S:g} s",
        f"at most {MOST_GROWTH:g} times the first third's, or {SLACK_BYTES >> 20} MiB more",
        f"processes older than {SETTLED_S:g} s",
    ],
    "observe/evaluate.md": [f"up to {WORDS[NUM_PROCESSES]} processes"],
    "observe/watch-a-run.md": [f"every {RELOAD_S} seconds", f"at most {MAX_ERRORS})"],
    "scale/gpus.md": [f"{ACTOR_GPU_SHARE} of their bundle's GPU"],
    "scale/time-sharing.md": [
        f"Buckets have {POOL_BUCKET_MIB} MiB",
        f"waited for {BOUNDS.starve_s:g} s reserves its GPUs",
        f"no shard awake for {BOUNDS.turn_s:g} s",
        f"{BOUNDS.lease_s:g} s without a sign of life",
    ],
    "start/your-data-and-reward.md": [f"Every {BLOCK:,} prompts contain each source"],
}  # fmt: skip


@pytest.mark.parametrize("page", QUOTES)
def test_a_page_quotes_the_numbers_of_the_code(page: str) -> None:
    text = re.sub(r"\s+", " ", (DOCS / page).read_text(encoding="utf-8"))
    assert [quote for quote in QUOTES[page] if quote not in text] == []


def test_the_picture_of_the_first_page_names_every_store_and_mode() -> None:
    words = set(re.findall(r"\w+", (DOCS / "flow.svg").read_text(encoding="utf-8")))
    assert {*typing.get_args(Mode), *typing.get_args(StoreKind)} - words <= {"auto", "local"}
