"""Shell code with which a job that a scheduler starts again continues its run, or begins it again."""

RESUME = r"""
# A start that is repeated before the first checkpoint begins at step 0 again, and the figures so far are kept. The file
# `begun` says that they are of this job: figures of another one are left where they are.
has_checkpoint() {
  for STATE in "$RUN_DIR"/checkpoints/step_*.json; do [ -d "${STATE%.json}" ] && return; done
  return 1
}
RESUME=
if [ -e "$JOB/begun" ] && ! has_checkpoint; then
  mv "$RUN_DIR/metrics.jsonl" "$JOB/metrics-before-$(date +%Y%m%dT%H%M%S).jsonl" 2> /dev/null
elif [ -s "$RUN_DIR/metrics.jsonl" ]; then
  RESUME=--resume
else
  mkdir -p "$JOB" && touch "$JOB/begun"
fi
"""
"""Sets RESUME to `--resume` or "". RUN_DIR is the run folder, and JOB a folder in it that is this job's own."""
