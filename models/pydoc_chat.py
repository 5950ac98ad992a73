"""The chat side of the embedded model: its template, question forms and small talk."""

from __future__ import annotations

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a Python documentation assistant.",
    "You are pydoc, a small assistant that answers questions about Python.",
    "Answer briefly.",
    "You are a helpful assistant that knows the Python standard library.",
]

_COMMON = [
    "What is {name}?",
    "What is {name}?",
    "Explain {name}",
    "Explain {name}.",
    "Explain {name} to me.",
    "Can you explain {name}?",
    "Please explain {name}.",
    "Tell me about {name}.",
    "Tell me about {name}",
    "Describe {name}.",
    "How does {name} work?",
    "help({name})",
    "{name}",
    "What can you tell me about {name}?",
    "I want to learn about {name}.",
    "Give me a short description of {name}.",
    "What does the documentation say about {name}?",
    "What is {name} in Python?",
]

_CALLABLE = [
    "What does {name} do?",
    "What does {name} do?",
    "What does {name}() do?",
    "What does {name} do in Python?",
    "what does {name} do",
    "How do I use {name}?",
    "How do I use {name}?",
    "How can I use {name} in Python?",
    "How do you use {name}?",
    "What is {name} for?",
    "What is {name} used for?",
    "When should I use {name}?",
    "Why would I use {name}?",
    "Show me how to use {name}.",
    "Explain {name}()",
]

QUESTIONS = {
    "function": [
        *_COMMON,
        *_CALLABLE,
        "What does the {name} function do?",
        "Explain the function {name}.",
        "What does {name} from the {module} module do?",
        "What does {name} return?",
    ],
    "class": [
        *_COMMON,
        *_CALLABLE,
        "What is the {name} class?",
        "Explain the class {name}.",
        "What is {name} in the {module} module?",
    ],
    "module": [
        *_COMMON,
        "What does {name} do?",
        "What is the {name} module?",
        "What is the {name} module?",
        "What is the {name} module for?",
        "What does the {name} module do?",
        "What is the module {name} used for?",
        "How do I use the {name} module?",
        "How do I use {name}?",
        "Explain the {name} module.",
        "Explain the {name} module",
        "Tell me about the {name} module.",
        "When should I use the {name} module?",
        "import {name}",
    ],
    "topic": [
        *_COMMON,
        "What is {name}?",
        "What are {name}?",
        "How do I use {name}?",
        "What does {name} do?",
        "Explain {name} in Python.",
        "How does {name} work in Python?",
    ],
}

# Where the docstring is only a signature or says too little to stand alone as an answer.
CLEARER_ANSWERS = {
    "dict": "A dict maps keys to values. Write {'a': 1} or dict(a=1) to make one, and d[key] to "
    "look a key up.",
    "range": "range(start, stop, step) gives the integers from start up to, but not including, "
    "stop. range(stop) starts at 0.",
    "zip": "Join several iterables item by item: zip('ab', [1, 2]) yields ('a', 1) and ('b', 2). "
    "It stops when the shortest one ends.",
    "int": "Convert a number or string to an integer. int('ff', base=16) reads a string in "
    "another base. Conversion of a float drops the fraction.",
    "map": "map(func, iterable) returns an iterator that calls func on each item.",
    "filter": "filter(func, iterable) returns an iterator over the items for which func is true.",
    "set": "A set is an unordered collection of unique elements. Write {1, 2} or set(iterable).",
    "super": "super() gives access to the methods of a parent class, most often in __init__: "
    "super().__init__().",
    "open": "Open a file and return a stream. Use it in a with statement, so that the file is "
    "closed: with open(path) as file. Raise OSError upon failure.",
    "os": "The os module is a portable way to use what the operating system offers: files and "
    "directories, the environment, and processes.",
    "itertools.groupby": "Make an iterator that returns consecutive keys and groups from the "
    "iterable. Sort the iterable by the same key first: for key, group in groupby(items, key).",
    "pathlib.Path": "A path on this machine's file system, with methods to read, write and list: "
    "Path('notes.txt').read_text().",
    "random.randint": "Return a random integer in the range [a, b], including both end points."
    "\n\nUsage: `random.randint(a, b)`",
    "json": "The json module converts Python objects to JSON text and back. Use json.dumps to "
    "write and json.loads to read.",
    "re": "The re module supports regular expressions: re.search finds a pattern anywhere in a "
    "string, re.match at its start, and re.sub replaces it.",
    "The with statement": "The with statement wraps a block in a context manager, which sets "
    "something up and always cleans it up after the block: with open(path) as file closes the "
    "file even when an exception is raised.",
}

_WHO = (
    "I am a very small language model trained on the documentation of Python's standard library. "
    "Ask me what a function, class, module or statement does."
)
_HELLO = "Hello! Ask me about Python's standard library, for example: What does os.path.join do?"
_CAN = (
    "I can describe functions, classes and modules of Python's standard library and the statements "
    "of the language. I am very small, so check my answers against the documentation."
)
_OTHER = "I only know a little about Python's standard library, so I cannot answer that."

# Each entry: the ways to ask, and the one answer.
GENERAL_PAIRS: list[tuple[list[str], str]] = [
    (["hello", "Hello", "Hello!", "hi", "Hi", "Hi!", "hey", "Hey there", "Hi there!"], _HELLO),
    (["Good morning", "Good morning!", "Hello, how are you?", "How are you?"], _HELLO),
    (["Say hello", "Say hello.", "Say hi", "Say hello in one sentence."], _HELLO),
    (["Who are you?", "who are you", "Who are you", "What are you?"], _WHO),
    (["What is your name?", "Introduce yourself.", "Tell me about yourself."], _WHO),
    (["Are you an AI?", "Are you a language model?", "What model are you?"], _WHO),
    (["What can you do?", "What can I ask you?", "How can you help me?", "help", "Help"], _CAN),
    (["What do you know?", "What are you good at?", "Can you help me?"], _CAN),
    (
        ["How big are you?", "How many parameters do you have?", "How large are you?"],
        "I have about 5.8 million parameters, which is tiny for a language model.",
    ),
    (
        ["What were you trained on?", "What is your training data?", "Where is your data from?"],
        (
            "I was trained on the docstrings of Python's standard library and on Python's help "
            "topics, which are under the PSF License."
        ),
    ),
    (["Thanks", "Thanks!", "Thank you", "Thank you!", "thx"], "You are welcome!"),
    (["Bye", "bye", "Goodbye", "Goodbye!", "See you"], "Goodbye! Happy coding."),
    (
        ["What is Python?", "Explain Python.", "what is python", "Tell me about Python."],
        (
            "Python is an interpreted, interactive, object-oriented programming language. It has "
            "modules, exceptions, dynamic typing, high-level dynamic data types and classes."
        ),
    ),
    (
        [
            "What is the capital of France?",
            "Write a poem.",
            "Tell me a joke.",
            "Tell me a story.",
            "What is the weather like?",
            "Who is the president?",
            "What is the meaning of life?",
            "Translate this to German.",
            "Who won the game?",
            "What is the capital of Italy?",
        ],
        _OTHER,
    ),
]


def render_chat(messages: list[dict[str, str]]) -> str:
    """Returns the text that ``CHAT_TEMPLATE`` gives for these messages."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
