"""The package in trainers that others have written: one program or patch for each."""
