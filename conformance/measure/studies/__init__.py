"""Our own studies: evidence for the results pages, run from the repository; the package does not ship them."""
