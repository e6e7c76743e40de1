"""An agent of smolagents, unmodified, as an environment: it rewrites its turns, so that an episode has several rows.

It asks for two steps with tools and, as a model that says numbers calls none, for a final answer under another system
prompt. The policy is rewarded for digits.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
import openai  # noqa: F401  smolagents imports it in the agent's thread, which several threads must not do at once
from digits import share_of_digits
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

PROMPTS = {
    **EMPTY_PROMPT_TEMPLATES,
    "system_prompt": "Answer in digits.",  # the prompt that smolagents brings has 4000 characters
    "final_answer": {"pre_messages": "Answer now.", "post_messages": "{{task}}"},
}


async def play(episode) -> float:
    """Let the agent run in a thread, as it blocks, and return the share of digits in all turns of the policy."""
    await episode.run_blocking(run, episode.endpoint, timeout_s=600)
    return share_of_digits(turn.text for turn in episode.turns)


def run(address) -> None:
    """Run one agent to its end: three calls of the policy."""
    model = OpenAIModel(address.model, api_base=address.url, api_key=address.secret, max_tokens=8)
    agent = ToolCallingAgent(tools=[], model=model, prompt_templates=PROMPTS, max_steps=2, verbosity_level=LogLevel.OFF)
    agent.run("Say a number.")
