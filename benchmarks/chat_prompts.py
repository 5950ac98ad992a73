"""Prompts as users of a chat write them: text, code, several scripts, and chats that grow.

English is the language reference, code the standard library; sentences of other languages are put
together anew for every prompt, with numbers that occur once.
Tests: tests/unit/benchmarks/test_chat_prompts.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

Messages = list[dict[str, str]]

SENTENCES = {
    "German": (
        "Können Sie mir bitte erklären, warum die Übertragung nach einigen Minuten abbricht?",
        "Der Zähler steht seit gestern auf {n}, obwohl niemand etwas geändert hat.",
        "Größere Anfragen werden zurückgestellt, bis genügend Speicher frei ist.",
        "„Das habe ich schon versucht“, schrieb sie, „es hat aber nichts geändert.“",
        "Außerdem müsste die Prüfung für Benutzer {n} heute noch ausgeführt werden.",
        "Fassen Sie den folgenden Absatz in höchstens drei Sätzen zusammen.",
        "Die Schlüssel für die Straße {n} liegen beim Hausmeister.",
        "Welche Möglichkeiten gäbe es, die Kosten für das nächste Quartal zu senken?",
    ),
    "Russian": (
        "Объясните, пожалуйста, почему соединение обрывается через несколько минут.",
        "Со вчерашнего дня счётчик показывает {n}, хотя никто ничего не менял.",
        "Большие запросы откладываются, пока не освободится достаточно памяти.",
        "«Я уже пробовала», — написала она, — «но ничего не изменилось».",
        "Кроме того, сегодня нужно проверить учётную запись номер {n}.",
        "Кратко перескажите следующий абзац не более чем в трёх предложениях.",
        "Как можно сократить расходы в следующем квартале?",
        "Напишите функцию, которая возвращает {n} самых частых слов в тексте.",
    ),
    "Chinese": (
        "请解释一下为什么连接几分钟后就会断开。",
        "从昨天开始，计数器一直显示{n}，可是没有人改过任何东西。",
        "较大的请求会被推迟，直到有足够的内存为止。",
        "“我已经试过了，”她写道，“但是什么都没有改变。”",
        "另外，今天还需要检查编号为{n}的账户。",
        "请用不超过三句话概括下面的段落。",
        "下个季度有哪些办法可以降低成本？",
        "写一个函数，返回文本中最常见的{n}个词。",
    ),
    "Japanese": (
        "数分後に接続が切れる理由を説明していただけますか。",
        "昨日からカウンターは{n}のままですが、誰も何も変更していません。",
        "大きなリクエストは、十分なメモリが空くまで延期されます。",
        "「もう試しました」と彼女は書いた。「でも何も変わりませんでした。」",
        "また、今日中に番号{n}のアカウントを確認する必要があります。",
        "次の段落を三つ以内の文に要約してください。",
        "来期のコストを下げるにはどのような方法がありますか。",
        "テキスト内で最も頻出する単語を{n}個返す関数を書いてください。",
    ),
    "Arabic": (
        "هل يمكنك أن تشرح لي لماذا ينقطع الاتصال بعد بضع دقائق؟",
        "منذ الأمس يعرض العداد {n} مع أن أحدا لم يغير شيئا.",
        "تؤجل الطلبات الكبيرة حتى تتوفر ذاكرة كافية.",
        "كتبت: «لقد جربت ذلك بالفعل، لكن لم يتغير شيء».",
        "بالإضافة إلى ذلك، يجب فحص الحساب رقم {n} اليوم.",
        "لخص الفقرة التالية في ثلاث جمل على الأكثر.",
        "ما هي الطرق الممكنة لخفض التكاليف في الربع القادم؟",
        "اكتب دالة تعيد أكثر {n} كلمة تكرارا في النص.",
    ),
    "emoji": (
        "Thanks a lot 🙏 that worked on the first try! 🎉🎉",
        "ok so the deploy is red again 🔴 build {n} … any idea? 🤔",
        "👍🏽 from me, 👎 from QA 😅",
        "Family plan 👨‍👩‍👧‍👦, flights to 🇩🇪 and 🇯🇵, budget ≈ €{n} 💶",
        "¯\\_(ツ)_/¯ no clue, let’s ask the team ❤️",
        "Reminder ⏰: ship ticket #{n} ✅ before Friday ☕️",
    ),
}
KINDS = ("English", "quotes", "code", *SENTENCES)
"""What a prompt may be of."""

MIN_CHARS, MAX_CHARS = 800, 8000
"""Of one prompt: 200 to 2,000 tokens of a large vocabulary; of scripts with a word in a character,
a third of that."""

_DENSE = 3
_DENSE_KINDS = ("Chinese", "Japanese")


def chat(kind: str, rng: random.Random) -> Messages:
    """One chat, of one question."""
    most = rng.randint(MIN_CHARS, MAX_CHARS) // (_DENSE if kind in _DENSE_KINDS else 1)
    return [
        {"role": "system", "content": "You are a helpful assistant. Answer briefly."},
        {"role": "user", "content": f"[{rng.getrandbits(40):x}] {text(kind, rng, most)}"},
    ]


def chats(count: int, seed: int) -> list[tuple[str, Messages]]:
    """Chats that are all different, with their kinds in turn."""
    rng = random.Random(seed)
    kinds = (KINDS[number % len(KINDS)] for number in range(count))
    return [(kind, chat(kind, rng)) for kind in kinds]


def growing(count: int, turns: int, seed: int) -> Iterator[Messages]:
    """Chats as they are sent turn by turn, each time whole, with other users' between them."""
    rng = random.Random(seed)
    users: list[Messages] = [
        [{"role": "system", "content": "You are a helpful assistant. Answer briefly."}]
        for _ in range(count)
    ]
    for _ in range(turns):
        for number, messages in enumerate(users):
            kind = KINDS[number % len(KINDS)]
            messages.append({"role": "user", "content": text(kind, rng, rng.randint(80, 600))})
            yield list(messages)
            messages.append({"role": "assistant", "content": text(kind, rng, 500)})


def text(kind: str, rng: random.Random, num_chars: int) -> str:
    """A text of one kind, of about that length."""
    if kind in SENTENCES:
        return _sentences(SENTENCES[kind], rng, num_chars)
    source = _code() if kind == "code" else _english()
    start = rng.randrange(len(source) - num_chars)
    found = source[start : start + num_chars]
    if kind == "quotes":
        return found.replace('"', "“").replace("'", "’").replace(" - ", " — ")
    return found


def _sentences(pool: Sequence[str], rng: random.Random, num_chars: int) -> str:
    parts: list[str] = []
    length = 0
    while length < num_chars:
        parts.append(rng.choice(pool).replace("{n}", str(rng.randrange(10_000_000))))
        length += len(parts[-1]) + 1
    return " ".join(parts)[:num_chars]


@cache
def _english() -> str:
    return "\n".join(topics.values())


@cache
def _code() -> str:
    folder = Path(json.__file__).parent.parent
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("[a-h]*.py")))
