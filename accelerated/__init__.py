"""Fast: the stages of `reference`, in files and under names of their own twins. Never imports the reference."""
