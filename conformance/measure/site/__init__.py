"""The documentation site: `nox -s docs` writes its pages into build/docs, builds them into site/ and checks them."""
