//! A drawing area with axes, as inline SVG.

use std::fmt::Display;

use super::markup::{Coordinate, EscapedHtml, append_markup};

/// Width of every drawing in its own units. The page scales it.
pub(crate) const PLOT_WIDTH: f64 = 960.0;
/// Where the axis begins, right of the names.
pub(crate) const AXIS_LEFT: f64 = 96.0;
/// Where the axis ends.
pub(crate) const AXIS_RIGHT: f64 = PLOT_WIDTH - 108.0;

/// An SVG drawing.
pub(crate) struct Drawing {
    markup: String,
}

impl Drawing {
    /// An empty drawing with a name and a description for screen readers. `id` must be unique on the page.
    pub(crate) fn new(id: &str, height: f64, name: &str, description: &str) -> Self {
        let markup = format!(
            "<div class=\"scroll\"><svg role=\"img\" viewBox=\"0 0 {PLOT_WIDTH} {}\" \
             aria-labelledby=\"{id}-name {id}-text\"><title id=\"{id}-name\">{}</title>\
             <desc id=\"{id}-text\">{}</desc>\n",
            Coordinate(height),
            EscapedHtml(name),
            EscapedHtml(description)
        );
        Self { markup }
    }

    pub(crate) fn into_svg(mut self) -> String {
        self.markup.push_str("</svg></div>\n");
        self.markup
    }

    /// A text. `anchor` is the part of it that is at x: `start`, `middle` or `end`.
    pub(crate) fn add_text(&mut self, (x, y): (f64, f64), anchor: &str, class: &str, text: &str) {
        let (x, y, text) = (Coordinate(x), Coordinate(y), EscapedHtml(text));
        append_markup(
            &mut self.markup,
            format_args!(
                "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" class=\"{class}\">{text}</text>\n"
            ),
        );
    }

    /// A rectangle. An empty tooltip is left out.
    pub(crate) fn add_rectangle(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        class: &str,
        tooltip: &str,
    ) {
        let [x, y, width, height] = [x, y, width.max(0.0), height.max(0.0)].map(Coordinate);
        append_markup(
            &mut self.markup,
            format_args!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" class=\"{class}\""
            ),
        );
        match tooltip.is_empty() {
            true => self.markup.push_str("/>\n"),
            false => append_markup(
                &mut self.markup,
                format_args!("><title>{}</title></rect>\n", EscapedHtml(tooltip)),
            ),
        }
    }

    pub(crate) fn add_line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let [x, y, to_x, to_y] = [from.0, from.1, to.0, to.1].map(Coordinate);
        append_markup(
            &mut self.markup,
            format_args!("<path d=\"M{x} {y}L{to_x} {to_y}\" class=\"{class}\"/>\n"),
        );
    }

    pub(crate) fn add_path(&mut self, path: &impl Display, class: &str) {
        append_markup(
            &mut self.markup,
            format_args!("<path d=\"{path}\" class=\"{class}\"/>\n"),
        );
    }

    /// A time axis below a plot.
    pub(crate) fn add_time_axis(&mut self, axis: &TimeAxis, y: f64) {
        self.add_line((AXIS_LEFT, y), (AXIS_RIGHT, y), "axis");
        for (seconds, label) in axis.labelled_ticks() {
            let x = axis.x_of_seconds(seconds);
            self.add_line((x, y), (x, y + 4.0), "axis");
            self.add_text((x, y + 17.0), "middle", "tick", &label);
        }
    }
}

/// The time axis of all plots of a page.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TimeAxis {
    /// CLOCK_MONOTONIC, in nanoseconds.
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
}

impl TimeAxis {
    /// Seconds since the begin of the axis.
    pub(crate) fn seconds_since_begin(&self, at_ns: u64) -> f64 {
        at_ns.saturating_sub(self.begin_ns) as f64 / 1e9
    }

    pub(crate) fn length_seconds(&self) -> f64 {
        self.seconds_since_begin(self.end_ns)
    }

    pub(crate) fn x_of_seconds(&self, seconds: f64) -> f64 {
        let share = super::markup::share_of_whole(seconds, self.length_seconds());
        AXIS_LEFT + share * (AXIS_RIGHT - AXIS_LEFT)
    }

    pub(crate) fn x_of_time_ns(&self, at_ns: u64) -> f64 {
        self.x_of_seconds(self.seconds_since_begin(at_ns))
    }

    /// About eight ticks with their labels.
    fn labelled_ticks(&self) -> Vec<(f64, String)> {
        let step = round_time_tick_step(self.length_seconds() / 8.0);
        let count = match step > 0.0 {
            true => (self.length_seconds() / step) as u32,
            false => 0,
        };
        let ticks = (0..=count).map(|number| f64::from(number) * step);
        ticks
            .map(|seconds| (seconds, format_clock_time(seconds, step)))
            .collect()
    }
}

/// The smallest round time step that is at least `least`.
fn round_time_tick_step(least: f64) -> f64 {
    const ROUND_TICK_STEPS_SECONDS: [f64; 10] = [
        15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0,
    ];
    if least <= 10.0 {
        return round_tick_step(least);
    }
    let found = ROUND_TICK_STEPS_SECONDS
        .into_iter()
        .find(|step| *step >= least);
    found.unwrap_or_else(|| 3600.0 * round_tick_step(least / 3600.0))
}

/// The smallest of 1, 2, 5, 10, … that is at least `least`. 0 if `least` is not positive and finite.
pub(crate) fn round_tick_step(least: f64) -> f64 {
    if !(least > 0.0 && least.is_finite()) {
        return 0.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    let found = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|step| step * power >= least);
    found.unwrap_or(10.0) * power
}

/// The label of a time on an axis with this step.
fn format_clock_time(seconds: f64, step: f64) -> String {
    if step <= 0.0 {
        return "0 s".to_owned();
    }
    if step < 15.0 {
        let digits = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
        return format!("{seconds:.digits$} s");
    }
    let whole = seconds.round() as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        hours => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// The vertical axis of a plot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ValueAxis {
    /// The y coordinate of `min_value`.
    pub(crate) bottom: f64,
    /// The y coordinate of `max_value`.
    pub(crate) top: f64,
    pub(crate) min_value: f64,
    pub(crate) max_value: f64,
    pub(crate) is_logarithmic: bool,
}

impl ValueAxis {
    pub(crate) fn y_of_value(&self, value: f64) -> f64 {
        let scaled = |value: f64| match self.is_logarithmic {
            true => value.max(self.min_value).ln(),
            false => value,
        };
        let span = scaled(self.max_value) - scaled(self.min_value);
        let share = super::markup::share_of_whole(scaled(value) - scaled(self.min_value), span);
        self.bottom - share * (self.bottom - self.top)
    }

    /// A few round values for the ticks.
    pub(crate) fn tick_values(&self) -> Vec<f64> {
        match self.is_logarithmic {
            true => self.log_ticks(),
            false => self.linear_ticks(),
        }
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let step = round_tick_step((self.max_value - self.min_value) / 5.0);
        let count = match step > 0.0 {
            true => ((self.max_value - self.min_value) / step + 1e-9) as u32,
            false => 0,
        };
        let ticks = (0..=count).map(|number| self.min_value + f64::from(number) * step);
        ticks.collect()
    }

    fn log_ticks(&self) -> Vec<f64> {
        let from = self.min_value.max(f64::MIN_POSITIVE).log10().floor() as i32;
        let to = self.max_value.max(f64::MIN_POSITIVE).log10().ceil() as i32;
        let ticks = (from..=to).map(|power| 10_f64.powi(power));
        let is_shown =
            |tick: &f64| *tick >= 0.999 * self.min_value && *tick <= 1.001 * self.max_value;
        ticks.filter(is_shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tick_steps_are_round_numbers() {
        for (least, step) in [
            (0.3, 0.5),
            (1.0, 1.0),
            (7.0, 10.0),
            (0.0, 0.0),
            (f64::NAN, 0.0),
        ] {
            assert!((round_tick_step(least) - step).abs() < 1e-9, "{least}");
        }
        assert_eq!(
            [round_time_tick_step(11.0), round_time_tick_step(100.0)],
            [15.0, 120.0]
        );
        assert_eq!(round_time_tick_step(9000.0), 18_000.0);
    }

    #[test]
    fn long_times_have_minutes_and_hours() {
        assert_eq!(format_clock_time(0.4, 0.2), "0.4 s");
        assert_eq!(format_clock_time(90.0, 30.0), "1:30");
        assert_eq!(format_clock_time(3661.0, 15.0), "1:01:01");
    }

    #[test]
    fn an_axis_without_length_has_one_point() {
        let axis = TimeAxis {
            begin_ns: 5,
            end_ns: 5,
        };
        assert_eq!(
            (axis.x_of_time_ns(5), axis.x_of_time_ns(7)),
            (AXIS_LEFT, AXIS_LEFT)
        );
        assert_eq!(axis.labelled_ticks().len(), 1);
    }

    #[test]
    fn values_map_to_heights() {
        let mut axis = ValueAxis {
            bottom: 100.0,
            top: 0.0,
            min_value: 1.0,
            max_value: 100.0,
            is_logarithmic: true,
        };
        let close =
            |axis: &ValueAxis, value, y: f64| assert!((axis.y_of_value(value) - y).abs() < 1e-9);
        close(&axis, 10.0, 50.0);
        close(&axis, 0.0, 100.0);
        assert_eq!(axis.tick_values().len(), 3);
        axis.is_logarithmic = false;
        close(&axis, 50.5, 50.0);
        axis.max_value = 1.0;
        close(&axis, 1.0, 100.0);
    }
}
