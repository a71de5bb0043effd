"""Holds the sets of LongBench: prompts, lengths of answers and metrics, as published.

Bai et al., 2024, https://arxiv.org/abs/2308.14508: `config/dataset2prompt.json`,
`config/dataset2maxlen.json`, `eval.py` and `pred.py` of https://github.com/THUDM/LongBench (MIT).
Prompts must stay equal to the letter, as figures could not be compared otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Set:
    """A set of LongBench: how its rows become questions and are scored."""

    template: str  # has {context}, and {input} if the set has a question
    max_new_tokens: int
    metric: str  # a name in `metrics.METRICS`
    chat: bool = True  # whether to ask in the chat template; else as plain text to continue
    first_line: bool = False  # whether only the reply's first line is scored


_BRIEF = (  # "asconcisely" is a misprint of the benchmark
    "asconcisely as you can, using a single phrase if possible. Do not provide any explanation."
)
_STORY = (
    "You are given a story, which can be either a novel or a movie script, and a question. Answer "
    f"the question {_BRIEF}\n\nStory: {{context}}\n\nNow, answer the question based on the story "
    f"{_BRIEF}\n\nQuestion: {{input}}\n\nAnswer:"
)
_ARTICLE_RULES = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". '
    "Do not provide any explanation."
)
_ARTICLE = (
    f"You are given a scientific article and a question. Answer the question {_ARTICLE_RULES}"
    "\n\nArticle: {context}\n\n Answer the question based on the above article "
    f"{_ARTICLE_RULES}\n\nQuestion: {{input}}\n\nAnswer:"
)
_PASSAGES_RULES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words."
)
_PASSAGES = (
    f"{_PASSAGES_RULES}\n\nThe following are given passages.\n{{context}}\n\n{_PASSAGES_RULES}"
    "\n\nQuestion: {input}\nAnswer:"
)
_COUNT = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
    "Please carefully read these paragraphs and determine how many unique paragraphs there are "
    "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
    "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
    "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
    "\n\nThe final answer is: "
)
_RETRIEVAL = (
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
    "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\n"
    "Please enter the number of the paragraph that the abstract is from. The answer format must be "
    'like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
)
_RETRIEVAL_ZH = (
    "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
    "下面是一个摘要\n\n{input}\n\n"
    '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：'
)
_FIELD = (
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
    "question based on the above text, only give me the answer and do not output any other words."
    "\n\nQuestion: {input}\nAnswer:"
)
_FIELD_ZH = (
    "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
    "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。"
    "\n\n问题：{input}\n回答："
)
_DUREADER = (
    "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
    "问题：{input}\n回答："
)
_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report."
    "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
)
_MEETING = (
    "You are given a meeting transcript and a query containing a question or instruction. Answer "
    "the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based "
    "on the above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:"
)
_MEETING_ZH = (
    "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n"
    "会议记录：\n{context}\n\n会议总结："
)
_NEWS = (
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
    "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
)
_KIND = (
    "Please determine the type of the question below. Here are some examples of questions."
    "\n\n{context}\n{input}"
)
_KIND_ZH = "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}"
_TRIVIA = (
    "Answer the question based on the given passage. Only give me the answer and do not output any "
    "other words. The following are some examples.\n\n{context}\n\n{input}"
)
_DIALOGUE = (
    "Summarize the dialogue into a few short sentences. The following are some examples."
    "\n\n{context}\n\n{input}"
)
_CODE = "Please complete the code given below. \n{context}Next line of code:\n"
_REPOSITORY = "Please complete the code given below. \n{context}{input}Next line of code:\n"

SETS = {
    "narrativeqa": Set(_STORY, 128, "f1"),
    "qasper": Set(_ARTICLE, 128, "f1"),
    "multifieldqa_en": Set(_FIELD, 64, "f1"),
    "multifieldqa_zh": Set(_FIELD_ZH, 64, "f1_zh"),
    "hotpotqa": Set(_PASSAGES, 32, "f1"),
    "2wikimqa": Set(_PASSAGES, 32, "f1"),
    "musique": Set(_PASSAGES, 32, "f1"),
    "dureader": Set(_DUREADER, 128, "rouge_l_zh"),
    "gov_report": Set(_REPORT, 512, "rouge_l"),
    "qmsum": Set(_MEETING, 512, "rouge_l"),
    "multi_news": Set(_NEWS, 512, "rouge_l"),
    "vcsum": Set(_MEETING_ZH, 512, "rouge_l_zh"),
    "trec": Set(_KIND, 64, "classification", chat=False, first_line=True),
    "triviaqa": Set(_TRIVIA, 32, "f1", chat=False, first_line=True),
    "samsum": Set(_DIALOGUE, 128, "rouge_l", chat=False, first_line=True),
    "lsht": Set(_KIND_ZH, 64, "classification", chat=False, first_line=True),
    "passage_count": Set(_COUNT, 32, "count"),
    "passage_retrieval_en": Set(_RETRIEVAL, 32, "retrieval"),
    "passage_retrieval_zh": Set(_RETRIEVAL_ZH, 32, "retrieval_zh"),
    "lcc": Set(_CODE, 64, "code_similarity", chat=False),
    "repobench-p": Set(_REPOSITORY, 64, "code_similarity", chat=False),
}
# Sets that LongBench-E has with evenly spread lengths, under these names with `_e`.
EVEN = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec",
    "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
