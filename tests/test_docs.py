"""The documentation: its links, its commands, and the page that a script writes."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
PAGES = sorted([*REPO.glob('*.md'), *(REPO / 'docs').glob('*.md')])
LINK = re.compile(r'\[[^\]\[]*\]\(([^)\s]+)\)')


def without_code(text: str) -> str:
    return re.sub(r'```.*?```', '', text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as GitHub does it."""
    headings = re.findall(r'^#+ +(.*)$', without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def blocks(language: str) -> list:
    """The code of a language in all pages, each with its page's name."""
    pattern = re.compile(rf'```(?:{language})\n(.*?)```', flags=re.DOTALL)
    return [
        pytest.param(code, id=f'{page.stem}-{i}')
        for page in PAGES
        for i, code in enumerate(pattern.findall(page.read_text()))
    ]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(without_code(page.read_text())):
        path, _, anchor = link.partition('#')
        if '://' in path or path.startswith('mailto:'):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f'{page.name}: {link}'
        if anchor:
            assert anchor in anchors(target), f'{page.name}: {link}'


def test_the_index_lists_every_page():
    index = REPO / 'docs/README.md'
    listed = {link for link in LINK.findall(index.read_text()) if '/' not in link}
    assert listed == {page.name for page in (REPO / 'docs').glob('*.md')} - {'README.md'}


@pytest.mark.parametrize('code', blocks('bash|shell'))
def test_commands_name_tools_and_options_there_are(code):
    for command in re.sub(r'\\\n', ' ', code).splitlines():
        words = shlex.split(command, comments=True)
        tools = [i for i, word in enumerate(words) if re.match(r'(\./)?tools/', word)]
        if not tools:
            continue
        tool, *arguments = words[tools[0] :]
        path = REPO / tool
        assert path.is_file(), command
        configs = [word for word in arguments if word.startswith('configs/')]
        inputs = [word for word in configs if (REPO / word).parent.name in ('coco', 'ade20k')]
        assert all((REPO / word).is_file() for word in inputs), command
        if path.suffix == '.py':
            source = path.read_text() + (REPO / 'inline_mm/launch.py').read_text()
            for option in (word.partition('=')[0] for word in arguments if word[:2] == '--'):
                names = (option, option.replace('--no-', '--'))
                assert option == '--help' or any(f"'{n}'" in source for n in names), command


@pytest.mark.parametrize('code', blocks('python'))
def test_python_is_python(code):
    compile(code, 'documentation', 'exec')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('page', 'number', 'expected'),
    [
        ('usage', -1, '[(1, 64, 16, 24), (1, 128, 8, 12), (1, 320, 4, 6), (1, 512, 2, 3)]'),
        ('imagenet', 0, "'inline_swin_tiny'"),
    ],
)
def test_examples_run(page, number, expected, tmp_path):
    text = (REPO / 'docs' / f'{page}.md').read_text()
    code = re.findall(r'```python\n(.*?)```', text, flags=re.DOTALL)[number]
    result = subprocess.run(
        [sys.executable, '-c', code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert expected in result.stdout


# The model zoo


@pytest.fixture(scope='module')
def zoo():
    spec = importlib.util.spec_from_file_location(
        'make_model_zoo', REPO / 'tools/make_model_zoo.py'
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_model_zoo_is_what_its_script_writes(zoo):
    """All but the numbers of most rows, which take minutes to count."""
    text = zoo.PAGE.read_text()
    lines = iter(text.splitlines())
    counted = []

    def row(kind, *arguments):
        name = arguments[0] if kind != 'config' else arguments[1]['Name']
        line = next(line for line in lines if line.startswith(('| `', '| [')))
        assert f'`{name}`' in line if kind != 'config' else f'[{name}]' in line
        chosen = {
            'backbone': ('inline_deit_tiny', 'inline_cswin_tiny'),
            'dense': ('inline_swin_tiny',),
            'config': (
                'mask-rcnn_inline-pvt-t_fpn_1x_coco',
                'fpn_inline-pvt-t_8xb4-40k_ade20k-512x512',
            ),
        }
        if name not in chosen[kind]:
            return line
        counted.append(name)
        return zoo.make_row(kind, *arguments)

    assert zoo.page(row) == text
    assert len(counted) == 5


def test_model_zoo_lists_every_config(zoo):
    text = zoo.PAGE.read_text()
    for path in (REPO / 'configs').glob('*/*.py'):
        assert f'(../{path.relative_to(REPO)})' in text, path.name
