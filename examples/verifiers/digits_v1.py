"""An environment of verifiers 0.4 with three turns: the policy is asked for numbers, and rewarded for digits.

The harness calls the model from within the environment's process; the harnesses that verifiers brings start a program.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult


class DigitsTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        said = "".join(str(node.message.content or "") for node in trace.nodes if node.message.role == "assistant")
        return sum(letter.isdigit() for letter in said) / max(1, len(said))


class DigitsTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield DigitsTask(vf.TaskData(prompt=f"Task {number}: a number?"), self.config.task)
            number += 1


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        _, prompt = self.resolve_prompt(data)  # in later turns the whole conversation
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = [message.model_dump(exclude_none=True) for message in prompt]
        # One time limit for all: by default a client gives up connecting after 5 s, even to a busy machine's own ports.
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=600) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class DigitsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class DigitsEnv(vf.Env[DigitsConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for question in ("Another one?", "And a last one?"):
                if segment.terminated:  # such as by an answer that verifiers cannot read
                    break
                segment = await talk.turn(question)


__all__ = ["DigitsEnv", "DigitsTaskset", "DirectHarness"]
