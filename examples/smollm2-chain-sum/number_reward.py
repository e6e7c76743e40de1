"""The reward: 1 if the last number of the answer is the right one."""

import re


def last_number(prompt, response, finish_reason):
    """Return 1.0 if the last number in the response is the prompt's answer, else 0.0."""
    found = re.findall(r"-?\d[\d,]*", response)
    return float(bool(found) and found[-1].replace(",", "") == prompt.answer)
