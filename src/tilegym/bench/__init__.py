"""End-to-end runs of Hugging Face models: loading, timed generation, kernel coverage, comparison with the unpatched."""
