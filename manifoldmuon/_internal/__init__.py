"""What several packages need and no user does. Not public: names here may change."""
