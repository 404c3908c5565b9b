"""Text to token files, token files to batches: `prepare`, `tokenizers`, `indexed` (file checks), `datasets`."""
