//! Formats of `/metrics`: OpenMetrics for scrapers that request it, Prometheus' text format for all others.
//!
//! The metrics library writes OpenMetrics. Prometheus' text format lacks its types `info` and `unknown`, and
//! names counters with `_total`. [`Format::render`] rewrites the comment lines; samples are equal in both
//! formats.
//!
//! Sources: OpenMetrics 1.0 §ABNF and §"Supported metric types"; Prometheus, "Exposition formats", text
//! format 0.0.4.
//!
//! Not supported: exemplars and timestamps, which no program of Reprise writes, and Prometheus' protocol
//! buffers.

/// A text format for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Prometheus,
}

impl Format {
    /// Chooses the format that an `Accept` header prefers. Without a header, or if it accepts neither format,
    /// that is Prometheus' text format, which every scraper reads.
    pub fn negotiate(accept: Option<&str>) -> Format {
        let (mut open_metrics, mut prometheus) = (0, 0);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality = parts.find_map(|part| part.strip_prefix("q=")).map_or(1000, permille);
            match media.as_str() {
                "application/openmetrics-text" => open_metrics = open_metrics.max(quality),
                "text/plain" | "text/*" | "*/*" => prometheus = prometheus.max(quality),
                _ => {}
            }
        }
        if open_metrics > 0 && open_metrics >= prometheus { Format::OpenMetrics } else { Format::Prometheus }
    }

    /// Value of the `Content-Type` header.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Converts metrics in OpenMetrics format to this format.
    pub fn render(self, open_metrics: String) -> String {
        match self {
            Format::OpenMetrics => open_metrics,
            Format::Prometheus => prometheus(&open_metrics),
        }
    }
}

/// Parses a quality value into thousandths; 0 if it is not a number from 0 to 1.
fn permille(text: &str) -> u32 {
    match text.trim().parse::<f64>() {
        Ok(quality) if (0.0..=1.0).contains(&quality) => (quality * 1000.0) as u32,
        _ => 0,
    }
}

fn prometheus(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        let comment = line.strip_prefix("# ").map(|comment| comment.splitn(3, ' ').collect::<Vec<_>>());
        match comment.as_deref() {
            // The final name depends on the type, which is in the next line.
            Some(["HELP", _, what]) => help = Some(what.replace("\\\"", "\"")),
            Some(["TYPE", name, kind]) => {
                let (suffix, kind) = match *kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                if let Some(what) = help.take() {
                    text.push_str(&format!("# HELP {name}{suffix} {what}\n"));
                }
                text.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
            }
            // Units are part of the names, and this format has no end marker.
            Some(["UNIT", ..] | ["EOF"]) => {}
            Some(_) | None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN_METRICS: &str = "# HELP build Version and \\\"node\\\".\n# TYPE build info\nbuild_info{version=\"1\"} 1\n\
        # HELP loads Load calls.\n# TYPE loads counter\nloads_total 3\n\
        # HELP wait_seconds Waiting.\n# TYPE wait_seconds histogram\n# UNIT wait_seconds seconds\n\
        wait_seconds_bucket{le=\"+Inf\"} 2\nwait_seconds_sum 0.5\nwait_seconds_count 2\n\
        # HELP odd Odd.\n# TYPE odd unknown\nodd 1\n# EOF\n";

    #[test]
    fn prometheus_text_has_only_types_of_its_format() {
        let expected = "# HELP build_info Version and \"node\".\n# TYPE build_info gauge\nbuild_info{version=\"1\"} 1\n\
            # HELP loads_total Load calls.\n# TYPE loads_total counter\nloads_total 3\n\
            # HELP wait_seconds Waiting.\n# TYPE wait_seconds histogram\n\
            wait_seconds_bucket{le=\"+Inf\"} 2\nwait_seconds_sum 0.5\nwait_seconds_count 2\n\
            # HELP odd Odd.\n# TYPE odd untyped\nodd 1\n";
        assert_eq!(Format::Prometheus.render(OPEN_METRICS.to_owned()), expected);
    }

    #[test]
    fn keeps_open_metrics_unchanged() {
        assert_eq!(Format::OpenMetrics.render(OPEN_METRICS.to_owned()), OPEN_METRICS);
    }

    #[test]
    fn the_accept_header_decides_the_format() {
        // As Prometheus 2.42 and 3.5 send it.
        let old = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                   text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let new = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                   text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for accept in [old, new, "Application/OpenMetrics-Text"] {
            assert_eq!(Format::negotiate(Some(accept)), Format::OpenMetrics, "{accept}");
        }
        let plain_first = "text/plain;q=0.9, application/openmetrics-text;q=0.5";
        let refused = "application/openmetrics-text;q=0";
        for accept in
            ["*/*", "text/plain", "text/html", "", plain_first, refused, "application/openmetrics-text;q=x"]
        {
            assert_eq!(Format::negotiate(Some(accept)), Format::Prometheus, "{accept}");
        }
        assert_eq!(Format::negotiate(None), Format::Prometheus);
    }
}
