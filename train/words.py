"""Word lists of the synthetic curriculum.

Plain ASCII tuples, so that the tokenizer can give nearly every entry a token of its own.
"""

SHE_NAMES = tuple(
    """Mia Anna Zoe Ella Lily Ruby Nora Ivy Maya Lucy Grace Chloe Emma Olivia Sophia Amelia Freya
    Ingrid Priya Aisha Fatima Leila Yuki Mei Hana Sakura Carmen Rosa Lucia Elena Ines Paula Marta
    Olga Irina Nadia Tanya Vera Zara Yara Amina Naomi Ruth Esther Judith Hannah Rachel Sarah Leah
    Daisy Holly Hazel Iris Violet Jade Pearl Alice Beth Clara Diana Erin Fiona Gina Heidi Julia
    Kate Laura Megan Nina Penny Queenie Rita Stella Tess Ursula Wendy Xenia""".split()
)
HE_NAMES = tuple(
    """Tom Ben Sam Max Leo Jack Noah Liam Ethan Oscar Hugo Felix Arthur Henry George Oliver Lucas
    Mateo Diego Pablo Carlos Javier Miguel Rafael Marco Luca Enzo Bruno Otto Klaus Lars Sven Erik
    Nils Axel Anders Ivan Boris Dmitri Yuri Viktor Omar Ali Hassan Karim Tariq Yusuf Amir Ravi
    Arjun Kiran Vikram Kenji Hiro Akira Jin Wei Chen Kofi Kwame Jabari Adam Caleb David Eli Frank
    Gavin Ian Jason Kevin Martin Nathan Peter Quentin Robert Steven Umar Walter Xavier Zack
    """.split()
)
OBJECTS = tuple(
    """pears apples plums lemons oranges grapes cherries nuts eggs cookies muffins candies books
    pens pencils crayons stamps cards coins shells stones marbles beads buttons stickers balloons
    toys dolls kites balls blocks puzzles cups plates spoons forks bowls jars boxes bags hats
    socks shoes scarves roses tulips seeds leaves flowers ribbons keys candles lamps tickets photos
    letters magnets badges flags bottles""".split()
)
CITIES = tuple(
    """Paris London Rome Berlin Madrid Oslo Vienna Prague Dublin Lisbon Athens Warsaw Helsinki
    Geneva Milan Naples Porto Seville Munich Hamburg Cairo Nairobi Lagos Accra Tunis Delhi Mumbai
    Tokyo Osaka Kyoto Seoul Hanoi Manila Sydney Perth Lima Bogota Quito Boston Denver""".split()
)
JOBS = tuple(
    """baker teacher nurse doctor farmer painter writer singer driver pilot sailor lawyer chef
    dentist plumber gardener tailor waiter miner judge artist actor engineer editor
    """.split()
)
PETS = tuple(
    "cat dog rabbit hamster parrot turtle goldfish lizard snake pony goat duck frog mouse".split()
)
COLORS = tuple("red blue green yellow purple orange pink brown black white gray gold".split())
FOODS = tuple(
    """pizza pasta rice soup salad bread cheese sushi tacos curry noodles pancakes chocolate fish
    beans cake honey yogurt olives mango""".split()
)
SHORT_WORDS = tuple(
    """sun map hat box cup pen dog cat tree star moon lake road door book fish bird rain snow wind
    apple house river stone chair table bread plant light green orange garden window winter summer
    yellow purple silver bridge forest""".split()
)
NUMBER_WORDS = tuple("zero one two three four five six seven eight nine ten".split())
NOUNS = tuple(
    """score price count total level points speed weight height length width budget rating size
    amount value number limit time cost""".split()
)
