"""How the shipped models were made: words, facts, rows, curriculum, training, evaluation and the card."""
