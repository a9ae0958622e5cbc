"""Archive of keys and values of wrapped chunks: storage, retrieval, and insertion into sessions."""
