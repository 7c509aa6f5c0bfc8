"""What is new, rarely needed or not yet proved useful: same laws and tests, no promise to stay."""

__all__: list[str] = []
