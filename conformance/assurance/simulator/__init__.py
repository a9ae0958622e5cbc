"""Random lives of caches and of an archive on a tiny model, each from one seed: `nox -s simulate`; see README.md."""
