"""Weight spaces: compare constraint sets for hidden matrices."""
