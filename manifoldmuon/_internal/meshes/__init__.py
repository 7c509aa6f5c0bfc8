"""Arrays on meshes, and work divided over devices."""
