//! Drawing of a plot with curves, as SVG or PNG.
//!
//! The font is part of the program, so that plots need no fonts of the system and equal inputs give equal bytes.

use std::sync::Once;

use anyhow::{Context, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

/// Width and height in pixels.
const SIZE: (u32, u32) = (960, 600);

/// Part by which the range of a plot without a free corner grows.
const HEADROOM: f64 = 0.3;

/// Font with the Latin glyphs of DejaVu Sans; its licence is next to it.
const FONT: &[u8] = include_bytes!("../../../fonts/DejaVuSans-subset.ttf");

/// Colours that people with colour blindness distinguish (Okabe and Ito 2008), and grey.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(130, 130, 130),
];

/// Axis with the text of its ticks.
#[derive(Debug)]
pub(super) struct Axis {
    pub(super) label: &'static str,
    pub(super) text: fn(f64) -> String,
}

/// Curve with its name.
#[derive(Debug)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// Curves with their axes.
#[derive(Debug)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
}

impl Series {
    pub(super) fn new(name: &str, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.to_owned(), points }
    }
}

/// Draws a plot as SVG.
pub(super) fn svg(plot: &Plot) -> anyhow::Result<String> {
    let mut text = String::new();
    draw(plot, &SVGBackend::with_string(&mut text, SIZE).into_drawing_area())?;
    Ok(text)
}

/// Draws a plot as PNG.
pub(super) fn png(plot: &Plot) -> anyhow::Result<Vec<u8>> {
    let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
    draw(plot, &BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area())?;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().context("cannot encode a plot")?;
    writer.write_image_data(&pixels).context("cannot encode a plot")?;
    writer.finish().context("cannot encode a plot")?;
    Ok(bytes)
}

fn draw<Backend: DrawingBackend>(plot: &Plot, area: &DrawingArea<Backend, Shift>) -> anyhow::Result<()>
where
    Backend::ErrorType: 'static,
{
    static FONT_REGISTERED: Once = Once::new();
    FONT_REGISTERED.call_once(|| {
        register_font("sans-serif", FontStyle::Normal, FONT)
            .unwrap_or_else(|_| unreachable!("the font is valid"));
    });
    draw_on(plot, area).map_err(|error| anyhow!("cannot draw the plot \"{}\": {error}", plot.title))
}

fn draw_on<Backend: DrawingBackend>(
    plot: &Plot,
    area: &DrawingArea<Backend, Shift>,
) -> Result<(), DrawingAreaErrorKind<Backend::ErrorType>> {
    area.fill(&WHITE)?;
    let (x, mut y) = (range(plot, |point| point.0), range(plot, |point| point.1));
    let (position, covered) = corner(plot, x, y);
    if covered > 0 {
        // Room for the legend above all curves.
        y.1 += (y.1 - y.0) * HEADROOM;
    }
    let mut chart = ChartBuilder::on(area)
        .caption(&plot.title, ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(56)
        .y_label_area_size(80)
        .build_cartesian_2d(x.0..x.1, y.0..y.1)?;
    chart
        .configure_mesh()
        .x_desc(plot.x.label)
        .y_desc(plot.y.label)
        .x_label_formatter(&|value| (plot.x.text)(*value))
        .y_label_formatter(&|value| (plot.y.text)(*value))
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 17))
        .light_line_style(WHITE)
        .draw()?;
    for (number, series) in plot.series.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(series.points.iter().copied(), style))?
            .label(&series.name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 24, y)], style));
        if series.points.len() <= 32 {
            let dots = series.points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
            chart.draw_series(dots)?;
        }
    }
    chart
        .configure_series_labels()
        .position(position)
        .legend_area_size(32)
        .label_font(("sans-serif", 15))
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(190, 190, 190))
        .draw()?;
    area.present()
}

/// Range of the coordinates, with a margin.
fn range(plot: &Plot, of: fn(&(f64, f64)) -> f64) -> (f64, f64) {
    let values =
        || plot.series.iter().flat_map(|series| &series.points).map(of).filter(|value| value.is_finite());
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
    if least > most {
        return (0.0, 1.0);
    }
    let margin = ((most - least) * 0.04).max(1e-6);
    (least - margin, most + margin)
}

/// Corner for the legend, and the number of points there: the upper left one unless another one is free.
fn corner(plot: &Plot, x: (f64, f64), y: (f64, f64)) -> (SeriesLabelPosition, usize) {
    use SeriesLabelPosition::{LowerLeft, LowerRight, UpperLeft, UpperRight};
    let count = |is_right: bool, is_upper: bool| {
        let is_in = |point: &&(f64, f64)| {
            let (across, up) = ((point.0 - x.0) / (x.1 - x.0), (point.1 - y.0) / (y.1 - y.0));
            (across > 0.6) == is_right
                && (across < 0.4) != is_right
                && (up > 0.55) == is_upper
                && (up < 0.45) != is_upper
        };
        plot.series.iter().flat_map(|series| &series.points).filter(is_in).count()
    };
    let corners = [
        (LowerRight, count(true, false)),
        (UpperLeft, count(false, true)),
        (UpperRight, count(true, true)),
        (LowerLeft, count(false, false)),
    ];
    let free = corners.into_iter().find(|(_, points)| *points == 0);
    free.unwrap_or((UpperLeft, count(false, true).max(1)))
}
