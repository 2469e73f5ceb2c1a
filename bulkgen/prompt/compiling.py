"""What the job's templates and chat templates have in common: how they are parsed and compiled, and what is refused."""

from jinja2 import Environment, Template, TemplateSyntaxError, meta, nodes

from bulkgen.errors import SpecError

_OTHER_FILES = {nodes.Include: "include", nodes.Import: "import", nodes.FromImport: "import", nodes.Extends: "extends"}


def parse_template(environment: Environment, whose: str, source: str) -> nodes.Template:
    """The tree of a template; `whose` it is, for messages. Raises SpecError, also where it wants another file."""
    try:
        tree = environment.parse(source)
    except TemplateSyntaxError as e:
        raise SpecError(f"{whose}: line {e.lineno} is not valid Jinja2: {e.message}") from e
    except RecursionError as e:
        raise SpecError(f"{whose}: is nested too deep for a template") from e
    except ValueError as e:  # a number of thousands of digits
        raise SpecError(f"{whose}: is not valid Jinja2: {e}") from e
    for node in tree.find_all(tuple(_OTHER_FILES)):
        what = _OTHER_FILES[type(node)]
        raise SpecError(f"{whose}: line {node.lineno}: {what} cannot be used, a template is read from one place only")
    return tree


def undeclared(environment: Environment, tree: nodes.Template) -> set[str]:
    """The variables that a template wants. As jinja2.meta finds them, but nothing is computed meanwhile."""
    tracker = meta.TrackingCodeGenerator(environment)
    tracker.optimizer = None
    tracker.visit(tree)
    return tracker.undeclared_identifiers


def compile_template(environment: Environment, whose: str, tree: nodes.Template) -> Template:
    """The tree as a template that can be rendered: finds filters and tests that do not exist. Raises SpecError.

    Nothing is computed while compiling. That takes an environment with `optimized=False` and a `finalize` that wants
    the context; otherwise Jinja folds constants, and `'x' * 10**9` is one.
    """
    try:
        return environment.from_string(tree)
    except TemplateSyntaxError as e:
        raise SpecError(f"{whose}: line {e.lineno} is not valid Jinja2: {e.message}") from e
    except (RecursionError, SyntaxError, ValueError) as e:  # Python's own limits for the code that Jinja writes
        raise SpecError(f"{whose}: cannot be compiled ({type(e).__name__}: {e})") from e
