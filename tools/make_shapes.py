"""Make the built-in data set of coloured shapes."""

import argparse
import inspect

from inline_mm.datasets import is_complete, make_shapes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument('root', nargs='?', default='data/shapes', help='folder of the data set')
    parser.add_argument('--num-train', type=int, help='training images')
    parser.add_argument('--num-val', type=int, help='validation images')
    parser.add_argument(
        '--image-size',
        type=int,
        nargs='+',
        metavar='PIXELS',
        help='side, or height and width',
    )
    parser.add_argument(
        '--objects',
        type=int,
        nargs=2,
        metavar=('LOW', 'HIGH'),
        help='objects on an image',
    )
    parser.add_argument(
        '--scale',
        type=float,
        nargs=2,
        metavar=('LOW', 'HIGH'),
        help="diameter of objects, as a fraction of the image's shorter side",
    )
    parser.add_argument(
        '--clutter',
        type=int,
        nargs=2,
        metavar=('LOW', 'HIGH'),
        help='bars of no class on an image',
    )
    parser.add_argument(
        '--min-visible',
        type=float,
        help="fraction of each object's area that stays visible",
    )
    parser.add_argument(
        '--clutter-on-top',
        action=argparse.BooleanOptionalAction,
        help='let clutter cover objects',
    )
    parser.add_argument(
        '--class-colours',
        action=argparse.BooleanOptionalAction,
        help="let an object's colour suggest its class",
    )
    parser.add_argument('--seed', type=int, help='same arguments, same data set')
    parser.add_argument(
        '--overwrite', action='store_true', help='replace a data set made with other arguments'
    )
    parameters = inspect.signature(make_shapes).parameters.values()
    parser.set_defaults(**{p.name: p.default for p in parameters if p.default is not p.empty})
    args = parser.parse_args()
    options = {**vars(args), 'progress': True}
    if isinstance(args.image_size, list) and len(args.image_size) == 1:
        options['image_size'] = args.image_size[0]
    present = is_complete(args.root)
    try:
        root = make_shapes(**options)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    verb = 'replaced' if args.overwrite and present else 'is there already' if present else 'made'
    print(f'{root}: {verb}')


if __name__ == '__main__':
    main()
