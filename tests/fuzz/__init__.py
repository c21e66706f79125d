"""Coverage-guided fuzzing of every decoder and connection."""
