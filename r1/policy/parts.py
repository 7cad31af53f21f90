"""The parts of a vision-language model: vision tower, projector and language model."""


def part_of(name: str) -> str:
    """The part that a parameter or module belongs to, by its name: vision_tower, projector or language_model."""
    words = name.split(".")  # words of a name, not its start: adapters stand under names of their own
    if "visual" not in words:
        return "language_model"
    return "projector" if any("merger" in word for word in words) else "vision_tower"
