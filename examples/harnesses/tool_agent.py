"""An agent of openai-agents, unmodified, as an environment: it speaks OpenAI's Responses API and has one tool.

It is asked for the price of an item. The price list has each item under its number backwards, which only rewards can
teach: the tool answers every other number with "none", and prices follow from a digest, so that nobody can guess them.
"""

# pyright: reportMissingImports=false
import random
from hashlib import sha256

import openai
from agents import Agent, MaxTurnsExceeded, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import ModelBehaviorError

set_tracing_disabled(True)
INSTRUCTIONS = "Find the price."


def item_of(task: int) -> str:
    """Return the number of the item that a task asks for."""
    return str(random.Random(task).randint(100, 999))


def price_of(item: str) -> str:
    """Return the price of an item, three digits."""
    return str(100 + int.from_bytes(sha256(item.encode()).digest()[:4], "big") % 900)


def share(said: str, wanted: str) -> float:
    """Return the share of characters at which two texts agree."""
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / max(len(said), len(wanted))


async def play(episode) -> float:
    """Let the agent look for one price, and return the share of its answer's digits that are right."""
    item, address = item_of(episode.prompt.fields["task"]), episode.endpoint

    @function_tool
    def price(number: str) -> str:
        return price_of(item) if number == item[::-1] else "none"

    async with openai.AsyncOpenAI(base_url=address.url, api_key=address.secret) as client:
        model = OpenAIResponsesModel(address.model, client)
        agent = Agent("clerk", instructions=INSTRUCTIONS, tools=[price], model=model)
        try:
            result = await Runner.run(agent, item, max_turns=3)
        except (MaxTurnsExceeded, ModelBehaviorError):  # It never answered, or called a tool that does not exist.
            return 0.0
    return share(str(result.final_output).strip(), price_of(item))
