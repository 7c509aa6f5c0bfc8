"""Helpers that several packages share. Not public: names here may change."""
