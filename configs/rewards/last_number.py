"""Right if the last whole number in the response is the answer."""

import re

REWARD_NAME = "last_number"
REWARD_TYPE = "sequential"


def compute_score(reward_input: dict) -> dict[str, float]:
    """1 or 0 for one response."""
    numbers = re.findall(r"-?\d+", reward_input["response"])
    accuracy = float(bool(numbers) and numbers[-1] == reward_input["ground_truth"])
    return {"overall": accuracy, "accuracy": accuracy}
