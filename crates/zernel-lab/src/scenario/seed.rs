//! The effect of a seed on a scenario: start times of the groups, and durations of their work.
//!
//! A deterministic run repeats exactly, so one run shows one order of events. Seeds give many orders, and a comparison
//! counts how many of them a scheduler wins.

use std::collections::BTreeMap;

use zernel_workload::WorkType;

use super::Scenario;

/// Random numbers that a seed determines (splitmix64).
struct SeededRandom(u64);

impl SeededRandom {
    fn next_random_word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A random number from 0 to 1.
    fn next_random_fraction(&mut self) -> f64 {
        (self.next_random_word() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The delay of each group's start, in microseconds.
pub(super) type StartOffsetsUs = BTreeMap<String, u64>;

/// Changes the service times of a scenario, and returns the delays of its groups.
pub(super) fn apply_seed(scenario: &mut Scenario, seed: u64) -> Result<StartOffsetsUs, String> {
    let mut random = SeededRandom(seed);
    let mut offsets = StartOffsetsUs::new();
    let spread = scenario.service_spread_percent / 100.0;
    for group in &mut scenario.groups {
        let offset = random.next_random_fraction() * scenario.start_spread_us as f64;
        offsets.insert(group.name.clone(), offset as u64);
        group.work_type = vary_durations_of_work(&group.work_type, spread, &mut random)
            .map_err(|error| format!("group `{}`: {error}", group.name))?;
    }
    Ok(offsets)
}

/// The work type with every `_us` parameter changed by at most the share `spread`.
fn vary_durations_of_work(
    work: &WorkType,
    spread: f64,
    random: &mut SeededRandom,
) -> Result<WorkType, toml::ser::Error> {
    let mut value = toml::Value::try_from(work)?;
    vary_durations(&mut value, spread, random);
    value
        .try_into()
        .map_err(|error: toml::de::Error| serde::ser::Error::custom(error))
}

fn vary_durations(value: &mut toml::Value, spread: f64, random: &mut SeededRandom) {
    let toml::Value::Table(table) = value else {
        return;
    };
    for (key, value) in table.iter_mut() {
        match value {
            toml::Value::Integer(number) if key.ends_with("_us") && *number > 0 => {
                let factor = 1.0 + spread * (2.0 * random.next_random_fraction() - 1.0);
                *number = ((*number as f64 * factor).round() as i64).max(1);
            }
            other => vary_durations(other, spread, random),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bursty_scenario() -> Scenario {
        let text = "about = 'x'\nservice_spread_percent = 10\n[[group]]\nname = 'a'\n\
                    work.bursty = { burst_us = 1000, sleep_us = 5000 }\n[[group]]\nname = 'b'";
        Scenario::parse(text, "x.toml").unwrap()
    }

    fn burst_us(scenario: &Scenario) -> u64 {
        match &scenario.groups[0].work_type {
            WorkType::Bursty(work) => work.burst_us,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn seed_determines_durations_and_start_offsets() {
        let with_seed = |seed| {
            let mut scenario = bursty_scenario();
            let offsets = apply_seed(&mut scenario, seed).unwrap();
            (scenario, offsets)
        };
        assert_eq!(with_seed(3), with_seed(3));
        assert_ne!(with_seed(3), with_seed(4));
        for seed in 0..50 {
            let (varied, offsets) = with_seed(seed);
            assert!((900..=1100).contains(&burst_us(&varied)), "seed {seed}");
            assert!(offsets.values().all(|offset| *offset <= 4000));
            assert_eq!(varied.groups[1], bursty_scenario().groups[1]);
        }
    }
}
