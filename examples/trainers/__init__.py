"""The package in third-party trainers: a program or patch for each trainer."""
