//! Content negotiation for `/metrics`: plain Prometheus text or OpenMetrics.

use axum::http::{HeaderMap, header};

use crate::TextFormat;

/// Returns the metrics format that a request's `Accept` headers prefer.
///
/// OpenMetrics needs a `q` at least as high as that of plain text. Without a preference the format
/// is plain text, which every scraper reads.
pub(crate) fn metrics_format(headers: &HeaderMap) -> TextFormat {
    let (mut open_metrics, mut plain) = (0.0, 0.0);
    let ranges = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    for range in ranges {
        let (kind, parameters) = range.split_once(';').unwrap_or((range, ""));
        let parameter = |name| media_type_parameter(parameters, name);
        let quality = match parameter("q").map(str::parse::<f32>) {
            None => 1.0,
            Some(quality) => quality.unwrap_or(0.0),
        };
        match kind.trim().to_ascii_lowercase().as_str() {
            "application/openmetrics-text" if parameter("version").is_none_or(|v| v == "1.0.0") => {
                open_metrics = quality.max(open_metrics);
            }
            "text/plain" => plain = quality.max(plain),
            _ => {}
        }
    }
    match open_metrics > 0.0 && open_metrics >= plain {
        true => TextFormat::OpenMetrics,
        false => TextFormat::Prometheus,
    }
}

pub(crate) fn content_type(format: TextFormat) -> &'static str {
    match format {
        TextFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        TextFormat::Prometheus | TextFormat::Quantiles => {
            "text/plain; version=0.0.4; charset=utf-8"
        }
    }
}

fn media_type_parameter<'a>(parameters: &'a str, wanted: &str) -> Option<&'a str> {
    parameters
        .split(';')
        .filter_map(|parameter| parameter.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case(wanted))
        .map(|(_, value)| value.trim().trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format_for(accept: &'static str) -> TextFormat {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, accept.parse().unwrap());
        metrics_format(&headers)
    }

    #[test]
    fn an_accept_header_of_prometheus_selects_openmetrics() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        assert_eq!(format_for(prometheus), TextFormat::OpenMetrics);
        assert_eq!(
            format_for("application/openmetrics-text"),
            TextFormat::OpenMetrics
        );
        assert_eq!(
            format_for("Application/OpenMetrics-Text; Version=\"1.0.0\""),
            TextFormat::OpenMetrics
        );
    }

    #[test]
    fn any_other_accept_header_selects_plain_text() {
        assert_eq!(metrics_format(&HeaderMap::new()), TextFormat::Prometheus);
        for accept in [
            "*/*",
            "text/html",
            "text/plain;q=0.9, application/openmetrics-text;q=0.8",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=x",
            "application/openmetrics-text;version=2.0.0",
            ";;,=",
        ] {
            assert_eq!(format_for(accept), TextFormat::Prometheus, "{accept}");
        }
    }
}
