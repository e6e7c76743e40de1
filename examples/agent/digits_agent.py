"""An agent of pydantic-ai, unmodified, as an environment: three model calls per episode, over the run's endpoint.

The policy is rewarded for digits. A real agent would have tools, and a reward that looks at what it did.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
import openai
from digits import share_of_digits
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTIONS = ("A number?", "Another one?", "And a last one?")


async def play(episode) -> float:
    """Let the agent ask the policy three times, in one conversation, and return the share of digits in its answers."""
    address, answers, history = episode.endpoint, [], None
    async with openai.AsyncOpenAI(base_url=address.url, api_key=address.secret) as client:
        agent = Agent(OpenAIChatModel(address.model, provider=OpenAIProvider(openai_client=client)))
        for question in QUESTIONS:
            result = await agent.run(question, message_history=history, model_settings={"max_tokens": 8})
            history = result.all_messages()
            answers.append(result.output)
            episode.reward(share_of_digits(answers))
    return share_of_digits(answers)
