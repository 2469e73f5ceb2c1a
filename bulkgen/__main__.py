"""`python -m bulkgen` is the `bulkgen` command."""

from bulkgen.cli import main

if __name__ == "__main__":
    main()
